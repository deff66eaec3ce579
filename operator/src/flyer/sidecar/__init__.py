"""The native sidecar of a job's pod: serves the job socket, and relays to the operator's gateway.

Uses only the standard library and `flyer.job`. Its script is `flyer-sidecar`.
"""
