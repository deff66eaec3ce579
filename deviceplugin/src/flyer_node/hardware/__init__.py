"""Hardware queries, run in a worker process that may hang and be killed."""
