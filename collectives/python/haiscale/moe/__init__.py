"""Mixture of experts: experts on several ranks, and one copy of a token for each destination node.

    links = haiscale.moe.connect(meshes)
    layer = MoE(1024, 512, experts=64, routing=Routing(top_k=6), links=links, shared=feed_forward)

`routing` chooses the experts of each token, `links` has the groups of ranks, `census` the counts
that every rank needs before tokens move, `hops` lists the copies of one hop, `flights` moves them,
`passage` is the order of hops, and `layer` the module.
"""

from haiscale.moe.balance import average_gradients, balance, balance_loss
from haiscale.moe.errors import ExchangeError, ExpertMismatchError, MoEError, NonFiniteError
from haiscale.moe.experts import Experts
from haiscale.moe.layer import MoE
from haiscale.moe.links import Counters, Links, connect
from haiscale.moe.routing import Choice, Router, Routing

__all__ = [
    "Choice",
    "Counters",
    "ExchangeError",
    "ExpertMismatchError",
    "Experts",
    "Links",
    "MoE",
    "MoEError",
    "NonFiniteError",
    "Router",
    "Routing",
    "average_gradients",
    "balance",
    "balance_loss",
    "connect",
]
