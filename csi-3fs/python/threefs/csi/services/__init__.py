"""The three gRPC services of the specification: identity, controller and node."""
