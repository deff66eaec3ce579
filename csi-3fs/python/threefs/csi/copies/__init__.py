"""Volumes with the contents of a snapshot or of another volume: copies inside the cluster.

| module | contents |
|---|---|
| `tree_copy` | units of work that copy and then compare a tree; each may be repeated |
| `volume_copy` | the copy of one volume, from its directory to its record |
| `fair_pool` | threads that run the units of many copies, in turns of tenants |
| `copies` | start, state and end of the copies of this process |
"""
