"""Benchmark of HFReduce, Gloo, Open MPI, MPICH and the limits of the machine; see `__main__`.

`rank_groups` starts the ranks (`torch_rank`, `native/`), `harness` sends them commands, and `speed`
defines the measurements and their goals. `layouts` compares other layouts, `standalone`
measures without ranks, and `machines` a slow network (`netns`) and failed ranks (`failures`).
"""
