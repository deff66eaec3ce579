"""Test doubles of the driver: 3FS directories, the mount manager, a FUSE daemon.

| module | replaces |
|---|---|
| `directories` | `clusters.Directories`: a tree in memory with quotas and attributes |
| `mount_manager` | `mount_manager_client.MountManager`: a mount table in memory |
| `fuse_daemon` | `threefs fuse`: a real FUSE daemon that serves one file, with the same options |
"""
