"""Planner of layouts: memory, traffic and predicted time of a step for each placement of the axes.

    haiscale plan llama-13b --topology topology.json

`models` has the sizes of a model, `memory`, `traffic` and `timing` what a layout needs, `search`
compares layouts, `text` shows them. The rules are those of `haiscale.placement`.

Pure Python: no torch. Files are read by `__main__` only.
"""

from haiscale.plan.models import MODELS, Model, ModelError
from haiscale.plan.search import Plan, plan

__all__ = ["MODELS", "Model", "ModelError", "Plan", "plan"]
