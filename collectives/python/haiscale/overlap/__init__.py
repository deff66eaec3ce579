"""Common part of data-parallel layers: gradients in flight, and steps that follow collectives.

`haiscale.ddp` averages buckets by allreduce, `haiscale.fsdp` shards by reduce-scatter. Both leave
gradients in flight after backward, and step their parameters when they have landed: `flight` is the
order, `steps` the optimizer, `guards` what makes readers wait.
"""
