"""Lateness of a tenant's requests while other clients flood every port; see `__main__`."""
