"""A real Kubernetes for tests, without a container engine.

etcd (Debian's), the control plane and one kubelet per node (built from the Go modules under
`go/`) run as plain processes of this machine; each node lives in its own mount, network, PID,
IPC and UTS namespace. Everything that a cluster is follows from one state folder: names,
processes (they carry the folder in their environment), interfaces and address range. So
`down` needs nothing but the folder's name, also after `up` was killed half-way.

`python -m testcluster --help` is the command line; `testcluster.up.up` the Python call.
"""
