"""ThreeFSClusters: StatefulSets of 3FS, their upgrades, and drains before services are removed.

`plan` decides and is pure; `controller` observes and acts.
"""
