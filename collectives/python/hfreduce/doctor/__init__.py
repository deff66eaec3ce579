"""`hfreduce-doctor`: what of this machine is in the way of fast collectives, and what to change.

It reads /proc and /sys, changes nothing, opens no connection and needs no rights.
"""
