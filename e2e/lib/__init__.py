"""Helpers of the end-to-end scenarios: the chart, users, volumes, jobs and fault injection."""
