"""The API server in memory: requests, admission, storage, watches and fault injection."""
