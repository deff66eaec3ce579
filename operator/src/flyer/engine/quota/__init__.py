"""Quotas: `snapshot` counts usage, `admission` admits waiting jobs, `usage` reports it."""
