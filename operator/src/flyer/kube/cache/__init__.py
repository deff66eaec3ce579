"""Caches of the watched objects: a view of each kind, all in one cluster cache.

`apiserver.cache` keeps the objects of one kind up to date. A view has the fields that the operator
reads; `cluster_cache` notifies a leader term of changes.
"""
