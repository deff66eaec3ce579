"""The holder: a process of its own that keeps a node's FUSE mounts alive.

It opens /dev/fuse, mounts, keeps the descriptor and starts a daemon with it (`threefs fuse --fd
N`). The kernel ends a mount when its last descriptor is closed; as long as the holder lives, a
daemon that dies is replaced with the same descriptor (`--resume`) and programs in pods only notice
a pause.
It is the only part of the driver that needs privileges, so it is small, uses the standard library
alone and knows neither gRPC nor Kubernetes. Its modules import each other relatively, because it
runs as a package of its own, without loading the rest of `threefs`.

| module | what |
|---|---|
| `protocol` | the socket's messages: one JSON line each way, descriptors by SCM_RIGHTS |
| `mountinfo` | the kernel's mount table, read without touching a mount |
| `syscalls` | one call about a mount in a child of its own, which can be killed |
| `connections` | the kernel's side of a mount, through /sys |
| `writing` | written-behind data, written out before a mount is undone |
| `daemon`, `daemons` | one daemon: started, watched, replaced; how that of a mount is made |
| `held` | what is held here, and where a call is under way |
| `mounts` | what is asked for: make, bind, undo, list |
| `undoing` | how a mount ends, in bounded time |
| `handover` | mounts that change their holder |
| `keeper` | a second process with copies of the descriptors, for when the holder is killed |
| `server` | the socket, and taking over from an older holder |
"""
