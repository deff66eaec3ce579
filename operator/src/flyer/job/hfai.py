"""The names of `hfai.client`, on top of `flyer.job.current()`: HAI training scripts run unmodified.

`install()` makes `import hfai.client` find this module where no other `hfai` is installed.
RANK and WORLD_SIZE count processes, as torchrun's do; HAI's count nodes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import types
from typing import TYPE_CHECKING, NoReturn

from flyer.job.handle import current

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "bind_hf_except_hook",
    "disable_warn",
    "get_whole_life_state",
    "go_suspend",
    "install",
    "receive_suspend_command",
    "set_priority",
    "set_watchdog_time",
    "set_whole_life_state",
]

_log = logging.getLogger(__name__)
_warnings_disabled = threading.Event()
_acknowledged = threading.Event()


def receive_suspend_command() -> bool:
    """Whether to save and call `go_suspend`; true only on the first node, as in HAI.

    The first true answer acknowledges the command to the scheduler.
    """
    job = current()
    if job.node_rank != 0 or not job.suspend_requested():
        return False
    if not _acknowledged.is_set():
        _acknowledged.set()
        job.received()
    return True


def go_suspend() -> NoReturn:
    """Release the nodes now; any rank may call it. Never returns."""
    current().release()


def set_whole_life_state(state: int) -> None:
    """Store a 32-bit value for all attempts."""
    current().user_state = state


def get_whole_life_state() -> int:
    """The value stored for all attempts; initially 0."""
    return current().user_state


def set_priority(priority: int | str) -> None:
    """Ignored with a warning: a job cannot change its own priority."""
    _warn(
        f"set_priority({priority!r}) has no effect: change `spec.priority` of the FlyerJob instead"
    )


def set_watchdog_time(seconds: int) -> None:
    """Ignored with a warning: the manifest sets the progress deadline."""
    _warn(
        f"set_watchdog_time({seconds!r}) has no effect: set `spec.progressDeadline` of the FlyerJob"
    )


def disable_warn() -> None:
    """Disable the warnings about calls without effect."""
    _warnings_disabled.set()


def bind_hf_except_hook(module: object | None = None) -> None:  # noqa: ARG001  HAI's signature
    """Let an uncaught exception fail the job immediately, with its text as the reason."""
    previous: Callable[..., object] = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        current().fail(f"rank {current().rank}: {kind.__name__}: {error}"[:1000])

    sys.excepthook = hook


def install() -> None:
    """Make `import hfai.client` find this module, unless another `hfai` is installed."""
    if "hfai" in sys.modules or importlib.util.find_spec("hfai") is not None:
        return
    package = types.ModuleType("hfai", "HAI's names on the Fire-Flyer job contract.")
    package.__path__ = []
    package.client = sys.modules[__name__]  # type: ignore[attr-defined]
    sys.modules["hfai"] = package
    sys.modules["hfai.client"] = sys.modules[__name__]


def _warn(message: str) -> None:
    if not _warnings_disabled.is_set():
        _log.warning(message)
