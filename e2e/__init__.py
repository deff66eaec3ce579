"""End to end: a real Kubernetes on one machine, and the stories that run on it."""
