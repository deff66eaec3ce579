"""Helpers of tests that use a real API server: a proxy that kills clients, nodes, a gateway."""
