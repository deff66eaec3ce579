"""torch's private names that HaiScale uses, one module for each area of torch.

Everything else in HaiScale uses torch's public names. Each module has a test that fails when a
release of torch moves a name.
"""
