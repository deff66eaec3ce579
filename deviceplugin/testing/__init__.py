"""Stand-ins for what a test machine lacks: sysfs of a GPU node, a GPU driver, a kubelet."""
