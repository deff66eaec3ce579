"""Driver of a local cluster: its nodes are process groups, its state is a folder.

cluster     the cluster file                       session     one driver's life
submit      accepting manifests                    driver      observe, step, commit, act
attempts    one gang: folders, socket, topology    pods        process groups, start to end
gateway     reports of ranks                        store       lock, job files, logs of lines
control     the socket that clients use            eventlog    the events of one cluster
"""
