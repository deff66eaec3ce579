"""The suite's container images: Containerfiles for users, and the same images without a daemon."""
