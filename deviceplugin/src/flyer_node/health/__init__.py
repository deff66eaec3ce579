"""Health of GPUs, pairs and ports: detectors, state machine, policy and fault sources."""
