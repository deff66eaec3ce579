"""Collectives for training pods that no FlyerJob made: a mutating webhook that fails open.

A pod with the label `fireflyer.dev/inject: "true"` gets the tools, HFReduce and its environment.
"""
