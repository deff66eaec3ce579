"""A simulator over the engine: virtual time, scripted jobs, failing machines, one seed."""

from flyer.sim.invariants import Invariants, Violation
from flyer.sim.samples import sample_job, two_zones
from flyer.sim.scripts import Manner, Script
from flyer.sim.world import World

__all__ = ["Invariants", "Manner", "Script", "Violation", "World", "sample_job", "two_zones"]
