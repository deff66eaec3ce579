"""Command-line options of an etcd cluster, for every service that keeps its rows there."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from threefs.etcd import DEFAULT_PREFIX, EtcdOptions

__all__ = ["with_etcd_options"]


def _etcd_options(
    *,
    etcd_endpoints: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_ETCD_ENDPOINTS",
            help="http://host:port or https://host:port of each etcd member, with commas.",
        ),
    ] = "",
    etcd_prefix: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_ETCD_PREFIX",
            help="Prefix of this cluster's keys in etcd, such as /3fs.",
        ),
    ] = DEFAULT_PREFIX,
    etcd_ca_file: Annotated[
        Path | None,
        typer.Option(envvar="THREEFS_ETCD_CA_FILE", help="Certificate authority of the members."),
    ] = None,
    etcd_cert_file: Annotated[
        Path | None,
        typer.Option(envvar="THREEFS_ETCD_CERT_FILE", help="Client certificate for etcd."),
    ] = None,
    etcd_key_file: Annotated[
        Path | None,
        typer.Option(envvar="THREEFS_ETCD_KEY_FILE", help="Key of the client certificate."),
    ] = None,
    etcd_user: Annotated[str, typer.Option(envvar="THREEFS_ETCD_USER", help="User of etcd.")] = "",
    etcd_password_file: Annotated[
        Path | None,
        typer.Option(envvar="THREEFS_ETCD_PASSWORD_FILE", help="File with the user's password."),
    ] = None,
    etcd_accept_restored: Annotated[
        bool,
        typer.Option(
            "--etcd-accept-restored",
            envvar="THREEFS_ETCD_ACCEPT_RESTORED",
            help="Accept once that etcd was restored from an older backup: later changes are lost.",
        ),
    ] = False,
) -> EtcdOptions:
    return EtcdOptions(
        endpoints=etcd_endpoints,
        prefix=etcd_prefix,
        ca_file=etcd_ca_file,
        cert_file=etcd_cert_file,
        key_file=etcd_key_file,
        user=etcd_user,
        password_file=etcd_password_file,
        accept_restored=etcd_accept_restored,
    )


def with_etcd_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `etcd` of a command by the options of an etcd cluster."""
    signature = inspect.signature(command, eval_str=True)
    options = inspect.signature(_etcd_options).parameters
    parameters = [each for each in signature.parameters.values() if each.name != "etcd"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        etcd = _etcd_options(**{name: values.pop(name) for name in options})
        command(**values, etcd=etcd)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *options.values()]
    )
    return run
