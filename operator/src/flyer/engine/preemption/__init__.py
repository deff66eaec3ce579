"""Preemption: `plan` finds nodes and victims, `victim_search` the cheapest set, `evict` acts."""
