"""3FS services for containers: one service in the foreground, and its probes.

``threefs-service`` is the command; `threefs.supervisor` runs the same services on one machine.
"""
