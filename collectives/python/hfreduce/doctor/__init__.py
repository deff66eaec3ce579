"""`hfreduce-doctor`: finds settings of this machine that slow collectives down, and the remedies.

It reads /proc and /sys, changes nothing, opens no connections and needs no privileges.
"""
