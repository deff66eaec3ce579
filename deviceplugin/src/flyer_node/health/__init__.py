"""Health of GPUs, pairs and ports: a pure state machine, policy as data, and the sources."""
