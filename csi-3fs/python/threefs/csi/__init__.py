"""CSI driver `3fs.csi.fireflyer.dev` (CSI 1.12): directories of 3FS as Kubernetes volumes.

| module | contents |
|---|---|
| `main`, `settings` | command line of the four processes: flags, variables, ports |
| `server`, `interceptor` | gRPC servers and their limits; logging and metrics of every call |
| `services/` | `identityserver`, `controllerserver`, `nodeserver`, and validation of requests |
| `volumes/` | volumes as directories: ids, parameters, records, inline volumes, node claims |
| `tickets/` | credentials of single volumes: issuer, authorization, store of a node |
| `mount_manager/` | separate process that owns /dev/fuse descriptors, mounts and daemons |
| `mount_manager_client` | client of the mount manager, for the node service |
| `proto/` | generated code of the specification |

The driver has no database: a volume is defined by its directory's record, a mount by the kernel's
mount table and the mount manager. The controller never mounts; the node service mounts only through
the mount manager, and never touches a path inside a mount.
"""
