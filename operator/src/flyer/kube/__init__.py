"""The driver of a Kubernetes cluster: the same engine, with pods instead of processes."""
