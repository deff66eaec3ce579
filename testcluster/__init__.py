"""A real Kubernetes for tests, without a container engine.

etcd (Debian's), the control plane and one kubelet per node (built by `programs`) run as plain
processes of this machine; each node lives in its own mount, network, PID, IPC and UTS namespace.
All of a cluster's names, processes (they carry the folder in their environment), interfaces and
its address range are derived from one state folder. So `down` needs only the folder's name, even
after `up` was killed.

`python -m testcluster --help` is the command line; `testcluster.up.up` the Python call.
"""
