"""Runs the user's command: a Python script inside this process, or another program by exec.

A script that runs here keeps the modules imported before the fork. Its `__main__`, `sys.argv`,
`sys.path`, tracebacks, exit statuses and finalisation are those of `python SCRIPT`. Where that is
impossible (interpreter options, another interpreter, variables that are read when an interpreter
starts), the command is executed instead, which is slower.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from flyer.job.failure import PEER_ERRORS, write_atomically
from flyer.job.pod import EXIT_PEER_LOST, PodSpec

__all__ = ["RankError", "error_path", "read_error", "run_command", "starts_its_own_ranks"]

FAILED_SECONDS_MAX = 3.0
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127

# An interpreter reads these at its start: they cannot be applied later.
_START_VARIABLES = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES")
_HARMLESS_VARIABLES = {"PYTHONUNBUFFERED"}


@dataclass(frozen=True, slots=True)
class RankError:
    """The exception that ends a rank, recorded before any clean-up."""

    time: float
    error_type: str
    traceback: str
    exit_status: int
    peer_lost: bool


def error_path(run_dir: Path, rank: int) -> Path:
    """File in which a rank records its exception for the launcher."""
    return run_dir / f"rank-{rank:04d}.error.json"


def read_error(run_dir: Path, rank: int) -> RankError | None:
    """The exception that ended a rank, if any."""
    try:
        return RankError(**json.loads(error_path(run_dir, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def starts_its_own_ranks(spec: PodSpec) -> bool:
    """Whether the command is torchrun itself, which runs as one process per node."""
    words = [*spec.command, *spec.args]
    if Path(words[0]).name == "torchrun":
        return True
    return (
        Path(words[0]).name.startswith("python")
        and "-m" in words
        and words[words.index("-m") + 1 :][:1] in (["torch.distributed.run"], ["torchrun"])
    )


def run_command(spec: PodSpec, rank: int) -> NoReturn:
    """Run the pod's command in this process, whose environment and descriptors are set."""
    words = [*spec.command, *spec.args]
    launcher_pid = os.getppid()
    try:
        if spec.working_dir is not None:
            os.chdir(spec.working_dir)
    except OSError as error:
        _stop(EXIT_NOT_FOUND, f"`workingDir` {spec.working_dir}: {error.strerror}")
    plan = _plan_in_process(spec, words)
    if plan is None:
        _execute(words)
    kind, target, arguments = plan
    _fresh_state()
    try:
        code, module = _load_module(target) if kind == "module" else _load_script(target)
    except _NotRunnableError:
        _execute(words)
    except SyntaxError as error:
        _report(spec, rank, launcher_pid, error.with_traceback(None))
    sys.argv = [target if kind == "script" else str(module.__dict__["__file__"]), *arguments]
    sys.modules["__main__"] = module
    # As in a new interpreter: the script's folder, or for a module the current one.
    sys.path.insert(0, os.getcwd() if kind == "module" else _script_folder(target))  # noqa: PTH109
    try:
        exec(code, module.__dict__)  # noqa: S102  the user's script is what we are here for
    except SystemExit as error:
        _finish(_exit_status(error))
    except BaseException as error:  # noqa: BLE001  all that a script may end with
        trace = error.__traceback__
        _report(spec, rank, launcher_pid, error.with_traceback(trace.tb_next if trace else None))
    _finish(0)


def _plan_in_process(spec: PodSpec, words: list[str]) -> tuple[str, str, list[str]] | None:
    """("script" or "module", its name, arguments); None if the command must be executed."""
    if not _is_this_interpreter(spec, words[0]) or _needs_fresh_start(spec):
        return None
    rest = words[1:]
    while rest[:1] == ["-u"]:
        rest.pop(0)
    if len(rest) >= 2 and rest[0] == "-m":
        return "module", rest[1], rest[2:]
    if rest and not rest[0].startswith("-") and Path(rest[0]).is_file():
        return "script", rest[0], rest[1:]
    return None


def _is_this_interpreter(spec: PodSpec, program: str) -> bool:
    """Whether the program is this interpreter; a bare `python` is, unless the pod sets PATH."""
    names = {"python", "python3", f"python3.{sys.version_info.minor}", Path(sys.executable).name}
    if "/" not in program:
        if program not in names:
            return False
        if "PATH" not in spec.env:
            return True
        found_program = shutil.which(program)
        if found_program is None:
            return True  # only `python3` exists, and it is this interpreter
        program = found_program
    # The links are not resolved: two virtual environments may link to one interpreter.
    path, own = os.path.normpath(program), os.path.normpath(sys.executable)
    if path == own:
        return True
    with contextlib.suppress(OSError):
        return os.path.dirname(path) == os.path.dirname(own) and os.path.samefile(path, own)  # noqa: PTH120, PTH121
    return False


def _needs_fresh_start(spec: PodSpec) -> bool:
    return any(
        name.startswith(_START_VARIABLES) and name not in _HARMLESS_VARIABLES for name in spec.env
    )


def _execute(words: list[str]) -> NoReturn:
    program = words[0]
    if program in ("python", "python3") and shutil.which(program) is None:
        program = sys.executable
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # ignored by Python, but not by other programs
    try:
        os.execvp(program, words)  # noqa: S606
    except FileNotFoundError:
        _stop(EXIT_NOT_FOUND, f"`command` names `{program}`, which is not in PATH on this node")
    except OSError as error:
        _stop(EXIT_NOT_EXECUTABLE, f"`command` names `{program}`: {error.strerror}")


def _stop(status: int, message: str) -> NoReturn:
    sys.stderr.write(f"flyer: {message}\n")
    sys.exit(status)


class _NotRunnableError(Exception):
    """Only a new interpreter can run it: a folder, an archive, compiled or invalid code."""


def _load_script(path: str) -> tuple[types.CodeType, types.ModuleType]:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise _NotRunnableError from error
    if b"\0" in source[:4096]:
        raise _NotRunnableError
    full_path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  as Python: not normalised
    code = compile(source, full_path, "exec", dont_inherit=True)
    return code, _main_module(full_path, None)


def _load_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  where `python -m` looks first
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if hasattr(loader, "get_code") and spec else None
    except SyntaxError:
        raise
    except Exception as error:  # its package may raise anything; Python reports it best
        raise _NotRunnableError from error
    finally:
        del sys.path[0]
    if code is None or spec is None or spec.origin is None:
        raise _NotRunnableError
    return code, _main_module(spec.origin, spec)


def _main_module(path: str, spec: Any) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __builtins__=__builtins__,
        __spec__=spec,
        __package__=spec.parent if spec is not None else None,
        __annotations__={},
    )
    if spec is not None:
        module.__loader__ = spec.loader
    return module


def _script_folder(path: str) -> str:
    return str(Path(path).resolve().parent)


def _fresh_state() -> None:
    """Reset the state that is separate in every interpreter and that a fork would share."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # Python's `random` does this after a fork, numpy does not
    torch: Any = sys.modules.get("torch")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # torch has read the fork server's variable


def _report(spec: PodSpec, rank: int, launcher_pid: int, error: BaseException) -> NoReturn:
    """Record the exception for the launcher, print it as Python does, and exit."""
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    # Its peers wait in a collective: a running thread must not delay the exit.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, FAILED_SECONDS_MAX)
    name = type(error).__name__
    if _port_is_taken(error):
        error.add_note(
            f"MASTER_PORT {spec.master_port} is in use by another program on node {spec.node}: "
            "a restart of the job gets another port"
        )
    peer_lost = bool(getattr(error, "peer_lost", name in PEER_ERRORS))
    status = EXIT_PEER_LOST if peer_lost else 1
    note = RankError(
        time=time.time(),
        error_type=f"{type(error).__module__}.{name}",
        traceback="".join(traceback.format_exception(error)),
        exit_status=status,
        peer_lost=peer_lost,
    )
    if os.getppid() == launcher_pid:  # not a child of the script
        write_atomically(error_path(Path(spec.run_dir), rank), json.dumps(asdict(note)))
    sys.excepthook(type(error), error, error.__traceback__)
    _finish(status)


def _port_is_taken(error: BaseException) -> bool:
    """Whether torch's store could not listen: its own message names only the port."""
    return type(error).__name__ == "DistNetworkError" and "EADDRINUSE" in str(error)


def _exit_status(error: SystemExit) -> int:
    """Python's exit status: None is 0, a number itself; anything else is printed and is 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _finish(status: int) -> NoReturn:
    """Exit as an interpreter does (threads, exit functions, buffers), but keep its modules.

    Tearing down the modules of a preloaded torch writes to every page shared with the fork server:
    it takes 0.6 s of CPU time per rank, and native libraries may crash in it.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
