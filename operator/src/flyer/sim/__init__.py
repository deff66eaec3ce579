"""Simulator of the engine: virtual time, scripted jobs and failing machines, from one seed."""

from flyer.sim.invariants import Invariants, Violation
from flyer.sim.samples import sample_job, two_zones
from flyer.sim.scripts import Behavior, Script
from flyer.sim.simulation import Simulation

__all__ = ["Behavior", "Invariants", "Script", "Simulation", "Violation", "sample_job", "two_zones"]
