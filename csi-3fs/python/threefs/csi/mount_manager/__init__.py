"""Mount manager: a separate process that owns a node's FUSE mounts.

It opens /dev/fuse, mounts, keeps the descriptor and starts a daemon with it (`threefs fuse --fd
N`). The kernel ends a mount when its last descriptor is closed. While the mount manager runs, a
daemon that dies is replaced with the same descriptor (`--resume`), and programs in pods notice only
a pause.

It is the only part of the driver that needs privileges. It is therefore small, uses only the
standard library and has no code for gRPC or Kubernetes. Its modules import each other relatively,
because it runs as a stand-alone package, without loading the rest of `threefs`.

| module | contents |
|---|---|
| `protocol` | messages of the socket: one JSON line each way, descriptors by SCM_RIGHTS |
| `mountinfo` | the kernel's mount table, read without touching a mount |
| `syscalls` | one mount call in a child process, which can be killed |
| `fuse_connections` | the kernel's side of a mount, through /sys |
| `cgroups` | memory limits of the daemons of each volume |
| `daemon`, `daemon_factory` | supervision of one daemon; its command line and user |
| `read_bytes` | bytes that the daemons of a mount have read |
| `mount_table` | the managed mounts, and locks of calls in progress |
| `service` | the requests: mount, bind, unmount, list |
| `unmount` | unmounting in bounded time |
| `writeback` | flushing of dirty data before an unmount |
| `handover` | transfer of mounts between mount managers |
| `fd_store` | a second process with copies of the descriptors, in case the manager is killed |
| `server` | the socket, and takeover from an older mount manager |
| `launch` | command lines that run this package |
"""
