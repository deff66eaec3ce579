"""The verbs of `flyer`: their arguments and implementations, imported when a verb is called.

docs/reference/cli.md documents exit statuses and JSON output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flyer.cli.arguments import Verb, argument, flag, toggle, value
from flyer.cli.output import Output
from flyer.cli.target import OPTIONS, target_of

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = ["HELP", "VERBS"]

HELP = """Run, watch and interrupt FlyerJobs.

  flyer run job.yaml --cluster cluster.yaml   start a cluster on this machine and run a job
  flyer ps -w                                 watch running and waiting jobs
  flyer why JOB                               explain why a job is waiting
  flyer logs -f JOB                           follow its output over all attempts
  flyer suspend JOB ; flyer resume JOB        interrupt and resume without losing a step

Without a cluster in .flyer/, or with --kube, --context or --kubeconfig, flyer uses the same
Kubernetes cluster as kubectl.
"""


def _number(kind: type[int | float], least: float) -> Any:
    """An argparse `type`: a number of at least `least`."""

    def parse(word: str) -> float:
        import argparse

        try:
            number = kind(word)
        except ValueError:
            number = kind(least - 1)
        if not number >= least:
            kinds = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"invalid value `{word}`: expected {kinds} >= {least:g}"
            )
        return number

    return parse


_JOB = argument("job", metavar="JOB", about="Job name, or namespace/name.")
_OUTPUT = value(
    "-o", "--output", default=Output.TABLE, metavar="FORMAT",
    choices=[item.value for item in Output], about="Output format: table, wide, json or yaml.",
)  # fmt: skip
_REASON = value("--reason", metavar="TEXT", about="Reason, shown in events and status.")


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
    from flyer.cli.completion_scripts import script

    print(script(args.shell), end="")


def _path(word: str | None) -> Any:
    from pathlib import Path

    return None if word is None else Path(word)


VERBS = (
    Verb(
        "run",
        r"""Run a job and follow it until it ends.

On Kubernetes, creates the job and follows it; Ctrl-C leaves it running. On this machine, the
first `flyer run` on a state directory drives the cluster in the foreground until every job
has ended; later ones submit to it. After a crash or Ctrl-C, run it again: unfinished jobs
resume from their last durable checkpoint. Exits with the exit status of the job.

flyer run examples/gpt/flyerjob.yaml --cluster examples/clusters/two-zones.yaml
flyer run other.yaml                     # submit to the running driver
flyer run                                # resume all unfinished jobs
""",
        (
            argument(
                "manifest",
                metavar="JOB.yaml",
                nargs="?",
                about="FlyerJob manifest. Default: resume stored jobs.",
            ),
            value(
                "--cluster",
                metavar="FILE",
                default=None,
                about="Cluster file: the simulated nodes.",
            ),
            value(
                "--preload",
                metavar="NAMES",
                about="Python modules to preload, for example torch,numpy.",
            ),
            value(
                "--logs",
                metavar="RANK",
                default="0",
                about="Rank whose output to print, all or none. Default: 0.",
            ),
            flag("--keep", about="Keep the driver running after every job has ended."),
            flag("--detach", about="Submit the job and return."),
            _OUTPUT,
            *OPTIONS,
        ),
        _run,
    ),
    Verb(
        "ps",
        r"""List jobs with state, reason, nodes, zone and progress.

flyer ps -w
flyer ps -o wide
flyer ps -o json | jq -r '.[] | select(.state == "Queued") | .name'
""",
        (flag("-w", "--watch", about="Watch for changes."), _OUTPUT, *OPTIONS),
        _ps,
    ),
    Verb(
        "show",
        r"""Show a job: placement, attempts, checkpoint, conditions and events.

flyer show gpt
flyer show gpt -o yaml        # includes the FlyerJob object, as kubectl prints it
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _show,
    ),
    Verb(
        "why",
        r"""Explain why a job is waiting, and what would unblock it.

Exits with 105 if the job can never run on this cluster.

flyer why gpt
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _why,
    ),
    Verb(
        "logs",
        r"""Print the output of a job's ranks over all attempts.

flyer logs -f gpt
flyer logs gpt --rank 3
flyer logs gpt --tail 50
flyer logs gpt --failed       # the traceback of the first failing rank
""",
        (
            _JOB,
            flag("-f", "--follow", about="Follow the output until the job ends."),
            value(
                "--rank",
                metavar="N",
                default=None,
                type=_number(int, 0),
                about="Print the output of one rank.",
            ),
            value(
                "--attempt",
                metavar="N",
                default=None,
                type=_number(int, 1),
                about="Print the output of one attempt.",
            ),
            value(
                "--tail",
                metavar="N",
                default=None,
                type=_number(int, 0),
                about="Print the last N lines.",
            ),
            flag("--failed", about="Print the traceback of the first failing rank."),
            _OUTPUT,
            *OPTIONS,
        ),
        _logs,
    ),
    Verb(
        "suspend",
        r"""Suspend a job: it saves a checkpoint and releases its nodes until it is resumed.

flyer suspend gpt --reason "need the nodes for a demo"
""",
        (
            _JOB,
            _REASON,
            toggle("--wait", about="Wait until its nodes are free. Default: wait."),
            value(
                "--timeout",
                metavar="SECONDS",
                default=0.0,
                type=_number(float, 0),
                about="Time limit of the wait. Default: 0, no limit.",
            ),
            _OUTPUT,
            *OPTIONS,
        ),
        _suspend,
    ),
    Verb(
        "resume",
        r"""Resume a suspended job: it queues again in its previous position.

flyer resume gpt
""",
        (_JOB, _OUTPUT, *OPTIONS),
        _resume,
    ),
    Verb(
        "stop",
        r"""Stop a job. Its checkpoints and logs are kept.

flyer stop gpt
""",
        (
            _JOB,
            _REASON,
            flag("--now", about="Kill it immediately, without a grace period."),
            _OUTPUT,
            *OPTIONS,
        ),
        _stop,
    ),
    Verb(
        "requeue",
        r"""Requeue a job: it saves a checkpoint, releases its nodes and queues again.

flyer requeue gpt
""",
        (_JOB, _REASON, _OUTPUT, *OPTIONS),
        _requeue,
    ),
    Verb(
        "nodes",
        r"""List nodes with zone, state, job, ranks and processes (supervisor first).

flyer nodes
kill -9 $(flyer nodes -o json | jq '.[] | select(.name == "a1") | .pids[]')   # fail a node
""",
        (_OUTPUT, *OPTIONS),
        _nodes,
    ),
    Verb(
        "queues",
        r"""List queues with running and waiting jobs, and the usage of quotas.

flyer queues
""",
        (_OUTPUT, *OPTIONS),
        _queues,
    ),
    Verb(
        "quotas",
        r"""List quotas with the nodes and jobs that count against them.

flyer quotas
""",
        (_OUTPUT, *OPTIONS),
        _quotas,
    ),
    Verb(
        "priority",
        r"""Change the priority of a job. Running jobs keep their nodes.

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
        r"""Show running jobs: speed, loss, bandwidth, checkpoint age and unsaved work.

flyer top -w
""",
        (
            flag("-w", "--watch", about="Refresh until Ctrl-C."),
            value(
                "--interval",
                metavar="SECONDS",
                default=2.0,
                type=_number(float, 0.1),
                about="Refresh interval. Default: 2.",
            ),
            _OUTPUT,
            *OPTIONS,
        ),
        _top,
    ),
    Verb(
        "completion",
        r"""Print the completion script of a shell.

source <(flyer completion bash)
flyer completion zsh > "${fpath[1]}/_flyer"
flyer completion fish > ~/.config/fish/completions/flyer.fish
""",
        (argument("shell", metavar="bash|zsh|fish", about="Shell: bash, zsh or fish."),),
        _completion,
    ),
)
