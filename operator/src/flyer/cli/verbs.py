"""The verbs of `flyer`: what each takes and does. Each imports what it needs when it is called.

docs/reference/cli.md tells exit statuses and JSON shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.cli.arguments import Verb, argument, flag, toggle, value
from flyer.cli.output import Output
from flyer.cli.target import OPTIONS, target_of
from flyer.errors import FlyerError

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["HELP", "VERBS"]

HELP = """Run, watch and interrupt FlyerJobs.

  flyer run job.yaml --cluster cluster.yaml   start a cluster on this machine and a job on it
  flyer ps -w                                 what runs and what waits
  flyer why JOB                               every reason why a job waits
  flyer logs -f JOB                           its output, over all attempts
  flyer suspend JOB ; flyer resume JOB        interrupt and go on, losing nothing

Where there is no cluster in .flyer/, or with --kube, --context or --kubeconfig, all of it is about
the Kubernetes cluster that kubectl would talk to.
"""


def _number(kind: type[int | float], least: float) -> Any:
    """A number that is not below `least`, as argparse's `type`."""

    def read(word: str) -> float:
        try:
            number = kind(word)
        except ValueError:
            number = kind(least - 1)
        if not number >= least:
            raise FlyerError.usage(
                f"`{word}` is not {'a whole number' if kind is int else 'a number'} from "
                f"{least:g} on",
                "mend the option's value; --help tells what it takes",
            )
        return number

    return read


_JOB = argument("job", metavar="JOB", about="Name, or namespace/name.")
_OUTPUT = value(
    "-o", "--output", default=Output.TABLE, metavar="FORMAT",
    choices=[one.value for one in Output], about="What to print: table, wide, json or yaml.",
)  # fmt: skip
_REASON = value("--reason", metavar="TEXT", about="Why, for others to read.")


def _run(args: Namespace) -> int:
    target = target_of(args)
    output = Output(args.output)
    if args.cluster is None and target.is_kube:
        from flyer.cli.run_on_kubernetes import run_on_kubernetes

        return run_on_kubernetes(
            _path(args.manifest), target, args.logs, output, detach=args.detach
        )
    from flyer.cli.run import RunOptions, run_command

    options = RunOptions(
        manifest=_path(args.manifest),
        cluster=_path(args.cluster),
        state=target.state,
        preload=[name for name in args.preload.split(",") if name],
        logs=args.logs,
        keep=args.keep,
        detach=args.detach,
        output=output,
    )
    return run_command(options)


def _ps(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.ps(target, output, watch=args.watch)


def _show(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.show(target.key(args.job), target, output)


def _why(args: Namespace) -> int:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    return read_verbs.why(target.key(args.job), target, output)


def _logs(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.logs(
        target.key(args.job), target, output,
        rank=args.rank, attempt=args.attempt, follow=args.follow, failed=args.failed,
        tail=args.tail,
    )  # fmt: skip


def _suspend(args: Namespace) -> None:
    from flyer.cli import write_verbs

    target, output = target_of(args), Output(args.output)
    write_verbs.suspend(
        target.key(args.job), target, output,
        reason=args.reason, wait=args.wait, timeout_seconds=args.timeout,
    )  # fmt: skip


def _resume(args: Namespace) -> None:
    from flyer.cli import write_verbs

    target, output = target_of(args), Output(args.output)
    write_verbs.resume(target.key(args.job), target, output)


def _stop(args: Namespace) -> None:
    from flyer.cli import write_verbs

    target, output = target_of(args), Output(args.output)
    write_verbs.stop(target.key(args.job), target, output, reason=args.reason, kill=args.now)


def _requeue(args: Namespace) -> None:
    from flyer.cli import write_verbs

    target, output = target_of(args), Output(args.output)
    write_verbs.requeue(target.key(args.job), target, output, reason=args.reason)


def _nodes(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.nodes(target, output)


def _queues(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.queues(target, output)


def _quotas(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.quotas(target, output)


def _priority(args: Namespace) -> None:
    from flyer.cli import write_verbs

    target, output = target_of(args), Output(args.output)
    write_verbs.priority(target.key(args.job), args.level, target, output)


def _top(args: Namespace) -> None:
    from flyer.cli import read_verbs

    target, output = target_of(args), Output(args.output)
    read_verbs.top(target, output, watch=args.watch, interval_seconds=args.interval)


def _completion(args: Namespace) -> None:
    from flyer.cli.completion import script

    print(script(args.shell), end="")


def _path(word: str | None) -> Any:
    from pathlib import Path

    return None if word is None else Path(word)


VERBS = (
    Verb(
        "run",
        r"""Run a job to its end; start the cluster's driver if none runs.

On Kubernetes it creates the job and follows it; Ctrl-C leaves it running. On this machine the
first `flyer run` on a state directory drives it in the foreground until every job has
ended; later ones submit to it. After a crash or Ctrl-C, run it again: unfinished jobs go on
from their last durable checkpoint. Ends with the job's own exit status.

flyer run examples/gpt/flyerjob.yaml --cluster examples/clusters/two-zones.yaml
flyer run other.yaml                     # to the driver that runs already
flyer run                                # go on with everything that is unfinished
""",
        (
            argument(
                "manifest", metavar="JOB.yaml", nargs="?", about="None: go on with what is stored."
            ),
            value("--cluster", metavar="FILE", default=None, about="The nodes to pretend."),
            value(
                "--preload",
                metavar="NAMES",
                about="Modules that all ranks share, such as torch,numpy.",
            ),
            value(
                "--logs",
                metavar="RANK",
                default="0",
                about="Whose output to print: a rank, all, none.",
            ),
            flag("--keep", about="Drive on when every job has ended."),
            flag("--detach", about="Submit to a running driver and return."),
            _OUTPUT,
            *OPTIONS,
        ),
        _run,
    ),
    Verb(
        "ps",
        r"""All jobs: state, reason, nodes, zone, progress.

flyer ps -w
flyer ps -o wide
flyer ps -o json | jq -r '.[] | select(.state == "Queued") | .name'
""",
        (flag("-w", "--watch", about="Show changes until Ctrl-C."), _OUTPUT, *OPTIONS),
        _ps,
    ),
    Verb(
        "show",
        r"""One job: placement, chain, attempts, checkpoint, conditions, events.

flyer show gpt
flyer show gpt -o yaml        # with the FlyerJob object, as kubectl would print it
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _show,
    ),
    Verb(
        "why",
        r"""Every reason why a job waits, with numbers, and what would unblock it.

Ends with 105 when the job can never run on this cluster.

flyer why gpt
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _why,
    ),
    Verb(
        "logs",
        r"""The ranks' output over all attempts, each line once.

flyer logs -f gpt
flyer logs gpt --rank 3
flyer logs gpt --tail 50
flyer logs gpt --failed       # the guilty traceback, as Python printed it
""",
        (
            _JOB,
            flag("-f", "--follow", about="Until the job ends."),
            value(
                "--rank", metavar="N", default=None, type=_number(int, 0), about="One rank alone."
            ),
            value(
                "--attempt", metavar="N", default=None, type=_number(int, 1), about="One attempt."
            ),
            value(
                "--tail", metavar="N", default=None, type=_number(int, 0), about="The last N lines."
            ),
            flag("--failed", about="The first failing rank's own last words."),
            _OUTPUT,
            *OPTIONS,
        ),
        _logs,
    ),
    Verb(
        "suspend",
        r"""Ask a job to save and leave its nodes; it waits until it is resumed.

flyer suspend gpt --reason "need the nodes for a demo"
""",
        (
            _JOB,
            _REASON,
            toggle("--wait", about="Wait until its nodes are free."),
            value(
                "--timeout",
                metavar="SECONDS",
                default=0.0,
                type=_number(float, 0),
                about="How long to wait; 0: for ever.",
            ),
            _OUTPUT,
            *OPTIONS,
        ),
        _suspend,
    ),
    Verb(
        "resume",
        r"""Let a suspended job queue again, in its old place.

flyer resume gpt
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _resume,
    ),
    Verb(
        "stop",
        r"""End a job for good. Its checkpoints and logs stay.

flyer stop gpt
""",
        (
            _JOB,
            _REASON,
            flag("--now", about="Kill at once, without time to save."),
            _OUTPUT,
            *OPTIONS,
        ),
        _stop,
    ),
    Verb(
        "requeue",
        r"""Make a job save, leave its nodes and queue again at once.

flyer requeue gpt
""",
        (_JOB, _REASON, _OUTPUT, *OPTIONS),
        _requeue,
    ),
    Verb(
        "nodes",
        r"""Every node: zone, state, job, ranks, processes (the supervisor first).

flyer nodes
kill -9 $(flyer nodes -o json | jq '.[] | select(.name == "a1") | .pids[]')   # a node dies
""",
        (_OUTPUT, *OPTIONS),
        _nodes,
    ),
    Verb(
        "queues",
        r"""Every queue: what runs, what waits; and what is used of the quotas.

flyer queues
""",
        (_OUTPUT, *OPTIONS),
        _queues,
    ),
    Verb(
        "quotas",
        r"""Every quota: how many of its nodes each user holds, and with which jobs.

flyer quotas
""",
        (_OUTPUT, *OPTIONS),
        _quotas,
    ),
    Verb(
        "priority",
        r"""Change a job's priority, now. What runs keeps its nodes.

flyer priority gpt high
""",
        (
            _JOB,
            argument("level", metavar="LEVEL", about="From low to extreme-high, or auto."),
            _OUTPUT,
            *OPTIONS,
        ),
        _priority,
    ),
    Verb(
        "top",
        r"""Running jobs: speed, loss, bandwidth, age of the checkpoint, what a kill would lose.

flyer top -w
""",
        (
            flag("-w", "--watch", about="Again and again."),
            value(
                "--interval",
                metavar="SECONDS",
                default=2.0,
                type=_number(float, 0.1),
                about="Between two looks.",
            ),
            _OUTPUT,
            *OPTIONS,
        ),
        _top,
    ),
    Verb(
        "completion",
        r"""The completion script of a shell.

source <(flyer completion bash)
flyer completion zsh > "${fpath[1]}/_flyer"
flyer completion fish > ~/.config/fish/completions/flyer.fish
""",
        (argument("shell", metavar="bash|zsh|fish", about="Which shell."),),
        _completion,
    ),
)
