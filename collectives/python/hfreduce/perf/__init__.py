"""`hfreduce-perf`: how fast the collectives are here, whether they are right, and what limits them.

Starts its own ranks on this machine, or joins those of a launcher. It needs neither torch nor
numpy: data and oracle are exact numbers of the standard library.
"""
