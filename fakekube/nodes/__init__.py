"""Nodes of the in-memory cluster: kubelets, containers and the pod network."""
