"""End-to-end scenarios on a real Kubernetes."""
