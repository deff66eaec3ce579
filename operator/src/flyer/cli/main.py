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

from flyer.cli.options import (
    JobName,
    Namespace,
    OutputFormat,
    Reason,
    State,
    key_of,
    output_wanted,
)
from flyer.cli.output import Output, print_error
from flyer.local.errors import ExitStatus, FlyerError

__all__ = ["app", "main"]

HELP = """Run, watch and interrupt FlyerJobs.

\b
  flyer run job.yaml --cluster cluster.yaml   start a cluster on this machine and a job on it
  flyer ps -w                                 what runs and what waits
  flyer why JOB                               every reason why a job waits
  flyer logs -f JOB                           its output, over all attempts
  flyer suspend JOB ; flyer resume JOB        interrupt and go on, losing nothing
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
def run(
    manifest: Annotated[
        Path | None, typer.Argument(metavar="[JOB.yaml]", help="None: go on with what is stored.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="The nodes to pretend.")
    ] = None,
    state: State = None,
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
) -> None:
    r"""Run a job to its end; start the cluster's driver if none runs.

    The first `flyer run` on a state directory drives it in the foreground until every job has
    ended; later ones submit to it. After a crash or Ctrl-C, run it again: unfinished jobs go on
    from their last durable checkpoint. Ends with the job's own exit status.

    \b
    flyer run examples/gpt/flyerjob.yaml --cluster examples/clusters/two-zones.yaml
    flyer run other.yaml                     # to the driver that runs already
    flyer run                                # go on with everything that is unfinished
    """
    from flyer.cli.run import RunOptions, run_command

    options = RunOptions(
        manifest=manifest,
        cluster=cluster,
        state=state,
        preload=[name for name in preload.split(",") if name],
        logs=logs,
        keep=keep,
        detach=detach,
        output=output,
    )
    raise typer.Exit(run_command(options))


@app.command()
def ps(
    watch: Annotated[
        bool, typer.Option("-w", "--watch", help="Show changes until Ctrl-C.")
    ] = False,
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""All jobs: state, reason, nodes, zone, progress.

    \b
    flyer ps -w
    flyer ps -o wide
    flyer ps -o json | jq -r '.[] | select(.state == "Queued") | .name'
    """
    from flyer.cli import read

    read.ps(state, output, watch=watch)


@app.command()
def show(
    job: JobName,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""One job: placement, chain, attempts, checkpoint, conditions, events.

    \b
    flyer show gpt
    flyer show gpt -o yaml        # with the FlyerJob object, as kubectl would print it
    """
    from flyer.cli import read

    read.show(key_of(job, namespace), state, output)


@app.command()
def why(
    job: JobName,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""Every reason why a job waits, with numbers, and what would unblock it.

    Ends with 105 when the job can never run on this cluster.

    \b
    flyer why gpt
    """
    from flyer.cli import read

    raise typer.Exit(read.why(key_of(job, namespace), state, output))


@app.command()
def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="One rank alone.")] = None,
    attempt: Annotated[int | None, typer.Option("--attempt", min=1, help="One attempt.")] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="The first failing rank's own last words.")
    ] = False,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""The ranks' output over all attempts, each line once.

    \b
    flyer logs -f gpt
    flyer logs gpt --rank 3
    flyer logs gpt --failed       # the guilty traceback, as Python printed it
    """
    from flyer.cli import read

    key = key_of(job, namespace)
    read.logs(key, state, output, rank=rank, attempt=attempt, follow=follow, failed=failed)


@app.command()
def suspend(
    job: JobName,
    reason: Reason = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Until its nodes are free.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait; 0: for ever.")
    ] = 0,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""Ask a job to save and leave its nodes; it waits until it is resumed.

    \b
    flyer suspend gpt --reason "need the nodes for a demo"
    """
    from flyer.cli import act

    act.suspend(
        key_of(job, namespace), state, output, reason=reason, wait=wait, timeout_seconds=timeout
    )


@app.command()
def resume(
    job: JobName,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""Let a suspended job queue again, in its old place.

    \b
    flyer resume gpt
    """
    from flyer.cli import act

    act.resume(key_of(job, namespace), state, output)


@app.command()
def stop(
    job: JobName,
    reason: Reason = "",
    now: Annotated[bool, typer.Option("--now", help="Kill at once, without time to save.")] = False,
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""End a job for good. Its checkpoints and logs stay.

    \b
    flyer stop gpt
    """
    from flyer.cli import act

    act.stop(key_of(job, namespace), state, output, reason=reason, kill=now)


@app.command()
def requeue(
    job: JobName,
    reason: Reason = "",
    namespace: Namespace = "default",
    state: State = None,
    output: OutputFormat = Output.TABLE,
) -> None:
    r"""Make a job save, leave its nodes and queue again at once.

    \b
    flyer requeue gpt
    """
    from flyer.cli import act

    act.requeue(key_of(job, namespace), state, output, reason=reason)


@app.command()
def nodes(state: State = None, output: OutputFormat = Output.TABLE) -> None:
    r"""Every node: zone, state, job, ranks, processes (the supervisor first).

    \b
    flyer nodes
    kill -9 $(flyer nodes -o json | jq '.[] | select(.name == "a1") | .pids[]')   # a node dies
    """
    from flyer.cli import read

    read.nodes(state, output)


@app.command()
def queues(state: State = None, output: OutputFormat = Output.TABLE) -> None:
    r"""Every queue: what runs, what waits.

    \b
    flyer queues
    """
    from flyer.cli import read

    read.queues(state, output)


def main() -> None:
    """The entry point: turns errors into words and exit statuses."""
    try:
        app(prog_name="flyer")
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
