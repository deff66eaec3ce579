"""Stages of a step, in the order in which they run.

1. `event_handlers`: records events, by `cluster_event_handlers`, `job_event_handlers` and
   `attempt_event_handlers`.
2. `reconcile`: move each job to the phase that its facts call for. `failure_causes` decides whether
   a failed attempt counts against its job, `circuit_breaker` whether many fail at once.
3. `schedule`: give nodes to waiting jobs. `queue` keeps their order and visits them, `allocate`
   places one job.
4. `commits`: store changed statuses. `actions_due`: derive the actions of drivers.
"""
