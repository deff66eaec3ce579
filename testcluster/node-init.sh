# The first process of a node's namespaces: private places for what a kubelet owns, then it reaps.
# NODE is the node's name, ROOT its folder. A node's other processes are started beside it.
set -eu
hostname "$NODE"

mkdir -p "$ROOT/var-lib/kubelet" "$ROOT/var-lib/containerd" "$ROOT/var-log"
mount --bind "$ROOT/var-lib" /var/lib
mount --bind "$ROOT/var-log" /var/log

# /sys/class/net and its kin show the network namespace in which sysfs was mounted.
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/lock /run/cgroup
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
umount -l /run/cgroup

# Mounts of CSI drivers in pods must reach the kubelet (propagation ends at this namespace).
mount --make-rshared /

sysctl -q -w net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0

touch "$ROOT/ready"
while :; do sleep 100000 & wait $!; done
