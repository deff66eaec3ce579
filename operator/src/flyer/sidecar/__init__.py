"""The native sidecar of a job's pod: serves the job socket, and relays to the operator's gateway.

Standard library only, and what `flyer.job` has. `flyer-sidecar` is its script.
"""
