"""The verbs of `flyer` and their options. Each verb imports what it needs when it is called.

docs/reference/cli.md tells exit statuses and JSON shapes.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from flyer.cli.options import JobName, OutputFormat, Reason, output_wanted
from flyer.cli.output import Output, print_error
from flyer.cli.target import Target, as_plugin, hang_up, targeted
from flyer.local.errors import ExitStatus, FlyerError

__all__ = ["app", "kubectl", "main"]

HELP = """Run, watch and interrupt FlyerJobs.

\b
  flyer run job.yaml --cluster cluster.yaml   start a cluster on this machine and a job on it
  flyer ps -w                                 what runs and what waits
  flyer why JOB                               every reason why a job waits
  flyer logs -f JOB                           its output, over all attempts
  flyer suspend JOB ; flyer resume JOB        interrupt and go on, losing nothing

Where there is no cluster in .flyer/, or with --kube, --context or --kubeconfig, all of it is about
the Kubernetes cluster that kubectl would talk to.
"""

app = typer.Typer(
    name="flyer",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: drawing boxes costs as much time as the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@targeted
def run(
    manifest: Annotated[
        Path | None, typer.Argument(metavar="[JOB.yaml]", help="None: go on with what is stored.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="The nodes to pretend.")
    ] = None,
    preload: Annotated[
        str, typer.Option("--preload", help="Modules that all ranks share, such as torch,numpy.")
    ] = "",
    logs: Annotated[
        str, typer.Option("--logs", help="Whose output to print: a rank, all, or none.")
    ] = "0",
    keep: Annotated[
        bool, typer.Option("--keep", help="Drive on when every job has ended.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Submit to a running driver and return.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Run a job to its end; start the cluster's driver if none runs.

    On Kubernetes it creates the job and follows it; Ctrl-C leaves it running. On this machine the
    first `flyer run` on a state directory drives it in the foreground until every job has
    ended; later ones submit to it. After a crash or Ctrl-C, run it again: unfinished jobs go on
    from their last durable checkpoint. Ends with the job's own exit status.

    \b
    flyer run examples/gpt/flyerjob.yaml --cluster examples/clusters/two-zones.yaml
    flyer run other.yaml                     # to the driver that runs already
    flyer run                                # go on with everything that is unfinished
    """
    if cluster is None and target.is_kube:
        from flyer.cli.kube_run import run_on_kubernetes

        raise typer.Exit(run_on_kubernetes(manifest, target, logs, output, detach=detach))
    from flyer.cli.run import RunOptions, run_command

    options = RunOptions(
        manifest=manifest,
        cluster=cluster,
        state=target.state,
        preload=[name for name in preload.split(",") if name],
        logs=logs,
        keep=keep,
        detach=detach,
        output=output,
    )
    raise typer.Exit(run_command(options))


@app.command()
@targeted
def ps(
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Show changes until Ctrl-C.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""All jobs: state, reason, nodes, zone, progress.

    \b
    flyer ps -w
    flyer ps -o wide
    flyer ps -o json | jq -r '.[] | select(.state == "Queued") | .name'
    """
    from flyer.cli import read

    read.ps(target, output, watch=watch)


@app.command()
@targeted
def show(
    job: JobName,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""One job: placement, chain, attempts, checkpoint, conditions, events.

    \b
    flyer show gpt
    flyer show gpt -o yaml        # with the FlyerJob object, as kubectl would print it
    """
    from flyer.cli import read

    read.show(target.key(job), target, output)


@app.command()
@targeted
def why(
    job: JobName,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Every reason why a job waits, with numbers, and what would unblock it.

    Ends with 105 when the job can never run on this cluster.

    \b
    flyer why gpt
    """
    from flyer.cli import read

    raise typer.Exit(read.why(target.key(job), target, output))


@app.command()
@targeted
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="One rank alone.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="One attempt.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The first failing rank's own last words.")
    ] = False,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""The ranks' output over all attempts, each line once.

    \b
    flyer logs -f gpt
    flyer logs gpt --rank 3
    flyer logs gpt --failed       # the guilty traceback, as Python printed it
    """
    from flyer.cli import read

    read.logs(
        target.key(job), target, output, rank=rank, attempt=attempt, follow=follow, failed=failed
    )


@app.command()
@targeted
def suspend(
    job: JobName,
    reason: Reason = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until its nodes are free.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait; 0: for ever.")
    ] = 0,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Ask a job to save and leave its nodes; it waits until it is resumed.

    \b
    flyer suspend gpt --reason "need the nodes for a demo"
    """
    from flyer.cli import act

    act.suspend(target.key(job), target, output, reason=reason, wait=wait, timeout_seconds=timeout)


@app.command()
@targeted
def resume(
    job: JobName,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Let a suspended job queue again, in its old place.

    \b
    flyer resume gpt
    """
    from flyer.cli import act

    act.resume(target.key(job), target, output)


@app.command()
@targeted
def stop(
    job: JobName,
    reason: Reason = "",
    now: Annotated[bool, typer.Option("--now", help="Kill at once, without time to save.")] = False,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""End a job for good. Its checkpoints and logs stay.

    \b
    flyer stop gpt
    """
    from flyer.cli import act

    act.stop(target.key(job), target, output, reason=reason, kill=now)


@app.command()
@targeted
def requeue(
    job: JobName,
    reason: Reason = "",
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Make a job save, leave its nodes and queue again at once.

    \b
    flyer requeue gpt
    """
    from flyer.cli import act

    act.requeue(target.key(job), target, output, reason=reason)


@app.command()
@targeted
def nodes(*, output: OutputFormat = Output.TABLE, target: Target) -> None:
    r"""Every node: zone, state, job, ranks, processes (the supervisor first).

    \b
    flyer nodes
    kill -9 $(flyer nodes -o json | jq '.[] | select(.name == "a1") | .pids[]')   # a node dies
    """
    from flyer.cli import read

    read.nodes(target, output)


@app.command()
@targeted
def queues(*, output: OutputFormat = Output.TABLE, target: Target) -> None:
    r"""Every queue: what runs, what waits; and what is used of the quotas.

    \b
    flyer queues
    """
    from flyer.cli import read

    read.queues(target, output)


@app.command()
@targeted
def quotas(*, output: OutputFormat = Output.TABLE, target: Target) -> None:
    r"""Every quota: how many of its nodes each user holds, and with which jobs.

    \b
    flyer quotas
    """
    from flyer.cli import read

    read.quotas(target, output)


@app.command()
@targeted
def priority(
    job: JobName,
    level: Annotated[
        str, typer.Argument(metavar="LEVEL", help="From low to extreme-high, or auto.")
    ],
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Change a job's priority, now. What runs keeps its nodes.

    \b
    flyer priority gpt high
    """
    from flyer.cli import act

    act.priority(target.key(job), level, target, output)


@app.command()
@targeted
def top(
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Again and again.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")
    ] = 2.0,
    output: OutputFormat = Output.TABLE,
    *,
    target: Target,
) -> None:
    r"""Running jobs: step, steps a second, what a kill would lose, age of the checkpoint.

    \b
    flyer top -w
    """
    from flyer.cli import read

    read.top(target, output, watch=watch, interval_seconds=interval)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Which shell.")],
) -> None:
    r"""The completion script of a shell.

    \b
    source <(flyer completion bash)
    flyer completion zsh > "${fpath[1]}/_flyer"
    flyer completion fish > ~/.config/fish/completions/flyer.fish
    """
    from flyer.cli.completion import script

    print(script(shell), end="")


def kubectl() -> None:
    """The entry point of `kubectl flyer`."""
    as_plugin()
    main("kubectl flyer")


def main(name: str = "flyer") -> None:
    """The entry point: turns errors into words and exit statuses."""
    try:
        app(prog_name=name)
    except FlyerError as error:
        print_error(error, output_wanted())
        sys.exit(int(error.exit_status))
    except KeyboardInterrupt:
        sys.exit(130)
    except AssertionError:
        # A bug of ours. Python's own status, 1, would say that a job's rank ended with 1.
        traceback.print_exc()
        sys.exit(int(ExitStatus.UNFINISHED))
    except BrokenPipeError:
        # Who read our output has left (`| head`): nothing more to say, and no noise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    finally:
        hang_up()
