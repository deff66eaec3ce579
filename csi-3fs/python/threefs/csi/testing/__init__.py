"""Stand-ins for tests, beside what they stand in for: 3FS's directories, the holder, a FUSE daemon.

| module | stands in for |
|---|---|
| `memory` | `directories.Directories`: a tree in memory with quotas and attributes |
| `holder` | `holder_client.Holder`: a mount table in memory |
| `daemon` | `threefs fuse`: a real FUSE daemon that shows one file, with the same options |
"""
