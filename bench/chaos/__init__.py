"""Checker of 3FS under faults: real processes, killed and stopped at moments that a seed decides.

See `__main__` for what a run does, and `linearizability` for what it proves.
"""
