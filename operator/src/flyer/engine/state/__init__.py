"""Values that a step reads and replaces, and the transitions of a job from phase to phase.

`engine_state` is all that is kept between steps; `cycle_state` is its mutable copy within a step.
"""
