"""The main job on one machine: trained, interrupted, broken on purpose, and compared bit by bit."""
