"""Questions to the hardware, asked from a worker process that may hang and be killed."""
