"""The main job on one machine: training, preemption and fault injection, compared bit by bit."""
