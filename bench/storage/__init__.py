"""Benchmark of 3FS, fio, iperf3, GlusterFS and MooseFS on one machine; see `__main__`.

`rows` defines the ratios and their goals. `mounts`, `random_io` and `small_files` measure
directories, `network` the transports of a read, `idle` the services without work. `gluster` and
`moosefs` start the peers in namespaces (`namespaces`).
"""
