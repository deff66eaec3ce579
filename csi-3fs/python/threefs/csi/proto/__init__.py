"""CSI wire format: `csi.proto` of the public specification and the code generated from it.

Do not edit `csi_pb2*`: ``python -m threefs.csi.proto.generate`` regenerates them.
"""
