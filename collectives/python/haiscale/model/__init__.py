"""Event model of training steps: layers, pipeline schedules and network cards.

Ranks execute lists of actions (`actions`): computation, messages to other ranks, collectives. The
transfers of a node share its card (`cards`). `simulator.run` executes the lists on a simulated
clock and reports when each rank ended, or which rank failed and why.

`pipelines` and `data_parallel` make the lists, `failures` adds faults, `hardware` has the constants
and their sources. ``python -m haiscale.model figures -o FOLDER`` draws the paper's Figures 8 and 9.

Pure Python: no torch, no clock, and random numbers from seeds only.
"""

from haiscale.model.actions import Action, Collective, Compute, Finish, Kind, Receive, Send, Start
from haiscale.model.cards import Sharing
from haiscale.model.simulator import DeadlockError, Outcome, Simulation, run

__all__ = [
    "Action",
    "Collective",
    "Compute",
    "DeadlockError",
    "Finish",
    "Kind",
    "Outcome",
    "Receive",
    "Send",
    "Sharing",
    "Simulation",
    "Start",
    "run",
]
