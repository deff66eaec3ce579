"""`hfreduce-perf`: measures and checks the collectives on these machines.

Starts its own ranks on this machine, or joins those of a launcher. It needs neither torch nor
numpy: data and oracle are exact numbers of the standard library.
"""
