"""Messages and services of the kubelet's interfaces; the other modules here are generated.

`python -m flyer_node.proto.generate` writes them from the .proto files; a test compares.
"""
