"""Parts of `bench/scheduler.py`: testbed, loads, simulated nodes, measurements."""
