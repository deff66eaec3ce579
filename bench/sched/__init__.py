"""What `bench/scheduler.py` is made of: a cluster, loads, simulated sidecars, measurements."""
