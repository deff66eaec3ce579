"""The CSI driver `3fs.csi.fireflyer.dev` (CSI 1.12): directories of 3FS as volumes of Kubernetes.

| module | what |
|---|---|
| `main`, `settings` | `threefs-csi controller|node|holder`: flags, variables, ports |
| `server`, `calls` | the gRPC socket and its bounds; a wrapper round every call |
| `identity`, `controller`, `node` | the three services of the specification |
| `requests`, `parameters`, `volume_id` | what a request may say; pure |
| `locks` | one call at a time for a volume |
| `volumes`, `directories` | a volume as a directory; 3FS behind a protocol |
| `inline` | volumes that live and die with a pod |
| `stats` | use and condition |
| `holder/` | a process of its own: keeps /dev/fuse descriptors, mounts, daemons |
| `holder_client` | the node service's side of the holder's socket |
| `proto/` | the specification's messages, generated |

There is no database: a volume is what its directory's record says, a mount is what the kernel's
mount table and the holder say. The controller never mounts anything; the node service never mounts
anything itself and never touches a path inside a mount.
"""
