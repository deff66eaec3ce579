"""Placement of one job: node availability, the choice of nodes, and backfill reservations."""
