"""The CSI wire format: `csi.proto` of the public specification and what is generated from it.

The generated modules are never edited; ``python -m threefs.csi.proto.generate`` writes them anew.
"""
