"""`threefs doctor`: the command and its options."""

from threefs.cli.options import Cluster, Format, Timeout
from threefs.cli.output import Output

__all__ = ["doctor"]


def doctor(
    cluster: Cluster = None,
    output: Format = Output.TABLE,
    timeout: Timeout = 10.0,
) -> None:
    """Check this machine, its connections to a cluster, and the cluster; change nothing.

    Each check that is not ok names a remedy. Without a cluster only the machine is checked. The
    exit status is 1 when there is a problem, and 0 with warnings.

    Examples: threefs doctor ; threefs doctor -o json | jq '.findings[] | select(.severity != "ok")'
    """
    from threefs.cli.findings import show_findings

    show_findings(cluster, output, timeout)
