"""Pipeline parallelism: schedules as data, run by torch's pipeline runtime.

`actions` is the vocabulary, `schedules` builds schedules, `check` refuses invalid ones, `timing`
plays them with given times and counts bubbles and activations, `picture` draws them. These are
pure: they load no torch.
"""

__all__: list[str] = []
