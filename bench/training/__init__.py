"""Benchmark of training steps: torch's DDP over Gloo and HFReduce, and haiscale's; see `__main__`.

`rank` is what each rank runs, `models` the models and their wrappers, `session` starts the ranks on
one node or on nodes with one link each, `turns` lets variants alternate. `ddp` and `pipeline`
define the measurements, `figures` and `pipeline_figures` their rows, and `parts` has their names.
"""
