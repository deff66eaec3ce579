"""Traces of training steps, and the time for which a step waits for communication.

`exposure.Exposure` is the share of the time for which a rank waits for communication. It costs two
clock readings for each such wait and is meant for every step of every job::

    exposure = Exposure()
    for step in steps:
        ...
        job.progress(step, loss=loss.item(), exposed=exposure.share())

`record.record` traces a few steps into one file for each rank, and ``haiscale trace`` draws them.
`spans`, `picture`, `traffic` and `heatmap` are pure; `chrome` is the format of the files;
`recorder`, `compute`, `operations` and `peers` collect.

This module imports nothing: the command needs no torch.
"""

__all__: list[str] = []
