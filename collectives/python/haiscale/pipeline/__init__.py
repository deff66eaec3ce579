"""Pipeline parallelism: schedules as data, run by torch's pipeline runtime.

`actions` is the vocabulary, `schedules` builds schedules, `check` refuses invalid ones, `timing`
plays them with given times and counts bubbles and activations, `picture` draws them. These are
pure: they load no torch. `module` trains a model.

The names of this module are those of HaiScale's training scripts (`methods`, `sequential`,
`subgroups`). They are loaded on first use.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from haiscale.pipeline.methods import GPipe, Interleaved1F1B, PipeDream
    from haiscale.pipeline.sequential import SequentialModel, partition
    from haiscale.pipeline.subgroups import make_subgroups

__all__ = [
    "GPipe",
    "Interleaved1F1B",
    "PipeDream",
    "SequentialModel",
    "make_subgroups",
    "partition",
]

_MODULES = {
    "GPipe": "haiscale.pipeline.methods",
    "Interleaved1F1B": "haiscale.pipeline.methods",
    "PipeDream": "haiscale.pipeline.methods",
    "SequentialModel": "haiscale.pipeline.sequential",
    "make_subgroups": "haiscale.pipeline.subgroups",
    "partition": "haiscale.pipeline.sequential",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'haiscale.pipeline' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
