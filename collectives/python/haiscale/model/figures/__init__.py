"""The paper's Figures 8 and 9 from constants and stated assumptions.

`figure8` and `figure9` compute the curves, `report` the claims and their sensitivity to each
assumption, `chart` draws. docs/internals/training-model.md explains the results.
"""

__all__: list[str] = []
