"""`flyer`, the command line."""
