"""3FS services for containers: one service in the foreground, its disk identity, its probes.

``threefs-service`` is the command; `threefs.supervisor` runs the same services on one machine.
"""
