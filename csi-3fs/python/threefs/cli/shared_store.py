"""Command-line options of the store that services share: an etcd cluster or PostgreSQL."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from threefs.etcd import DEFAULT_PREFIX, EtcdOptions
from threefs.postgres import DEFAULT_SCHEMA, PostgresOptions
from threefs.shared_store import SharedStore

__all__ = ["with_shared_store"]


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


def _postgres_options(
    *,
    postgres_url: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_POSTGRES_URL",
            help="postgresql://USER@HOST:PORT/DATABASE without a password, with commas between "
            "several HOST:PORT.",
        ),
    ] = "",
    postgres_schema: Annotated[
        str,
        typer.Option(
            envvar="THREEFS_POSTGRES_SCHEMA",
            help="Start of the names of this cluster's schemas, such as threefs.",
        ),
    ] = DEFAULT_SCHEMA,
    postgres_ca_file: Annotated[
        Path | None,
        typer.Option(
            envvar="THREEFS_POSTGRES_CA_FILE",
            help="Certificate authority of the servers. Without it, TLS is not used.",
        ),
    ] = None,
    postgres_cert_file: Annotated[
        Path | None,
        typer.Option(
            envvar="THREEFS_POSTGRES_CERT_FILE", help="Client certificate for PostgreSQL."
        ),
    ] = None,
    postgres_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="THREEFS_POSTGRES_KEY_FILE", help="Key of PostgreSQL's client certificate."
        ),
    ] = None,
    postgres_password_file: Annotated[
        Path | None,
        typer.Option(
            envvar="THREEFS_POSTGRES_PASSWORD_FILE",
            help="File with the password of PostgreSQL's user.",
        ),
    ] = None,
    postgres_require_standby: Annotated[
        bool,
        typer.Option(
            "--postgres-require-standby/--no-postgres-require-standby",
            envvar="THREEFS_POSTGRES_REQUIRE_STANDBY",
            help="Refuse a server without a synchronous standby.",
        ),
    ] = True,
    postgres_accept_restored: Annotated[
        bool,
        typer.Option(
            "--postgres-accept-restored",
            envvar="THREEFS_POSTGRES_ACCEPT_RESTORED",
            help="Accept once that PostgreSQL was restored elsewhere: later changes are lost.",
        ),
    ] = False,
) -> PostgresOptions:
    return PostgresOptions(
        url=postgres_url,
        schema=postgres_schema,
        ca_file=postgres_ca_file,
        cert_file=postgres_cert_file,
        key_file=postgres_key_file,
        password_file=postgres_password_file,
        require_standby=postgres_require_standby,
        accept_restored=postgres_accept_restored,
    )


def with_shared_store(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `shared` of a command by the options of both kinds of store."""
    signature = inspect.signature(command, eval_str=True)
    etcd = inspect.signature(_etcd_options).parameters
    postgres = inspect.signature(_postgres_options).parameters
    parameters = [each for each in signature.parameters.values() if each.name != "shared"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        shared = SharedStore(
            _etcd_options(**{name: values.pop(name) for name in etcd}),
            _postgres_options(**{name: values.pop(name) for name in postgres}),
        )
        command(**values, shared=shared)

    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *etcd.values(), *postgres.values()]
    )
    return run
