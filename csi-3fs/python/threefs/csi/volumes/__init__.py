"""Volumes as directories of 3FS: ids, parameters, records, inline volumes and node claims."""
