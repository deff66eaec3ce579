"""3FS services as containers: one service in the foreground, its disk's identity, its probes.

``threefs-service`` is the command; `threefs.supervisor` runs the same services on one machine.
"""
