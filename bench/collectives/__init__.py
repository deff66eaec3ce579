"""HFReduce beside Gloo, Open MPI, MPICH and the machine's own limits; see `__main__`.

`stage` gives orders to ranks that sleep between them, `crews` starts the ranks (`torch_rank`,
`native/`), `speed` says what is measured, `rows` what of it the goals are. `alone` needs no ranks;
`layouts`, `netns`, `failures` are programs of their own, too.
"""
