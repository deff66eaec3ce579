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


def _option(name: str, kind: Any, default: Any, text: str, *flags: str) -> inspect.Parameter:
    """A parameter of a command, with an option and an environment variable of its name."""
    option = typer.Option(*flags, envvar=f"THREEFS_{name.upper()}", help=text)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option])


# Their names are those of the fields of `EtcdOptions`, after the prefix.
ETCD = (
    _option(
        "etcd_endpoints",
        str,
        "",
        "http://host:port or https://host:port of each etcd member, with commas.",
    ),
    _option(
        "etcd_prefix", str, DEFAULT_PREFIX, "Prefix of this cluster's keys in etcd, such as /3fs."
    ),
    _option("etcd_ca_file", Path | None, None, "Certificate authority of the members."),
    _option("etcd_cert_file", Path | None, None, "Client certificate for etcd."),
    _option("etcd_key_file", Path | None, None, "Key of the client certificate."),
    _option("etcd_user", str, "", "User of etcd."),
    _option("etcd_password_file", Path | None, None, "File with the user's password."),
    _option(
        "etcd_accept_restored",
        bool,
        False,
        "Accept once that etcd was restored from an older backup: later changes are lost.",
        "--etcd-accept-restored",
    ),
)
# Those of `PostgresOptions`.
POSTGRES = (
    _option(
        "postgres_url",
        str,
        "",
        "postgresql://USER@HOST:PORT/DATABASE without a password, with commas between several "
        "HOST:PORT.",
    ),
    _option(
        "postgres_schema",
        str,
        DEFAULT_SCHEMA,
        "Start of the names of this cluster's schemas, such as threefs.",
    ),
    _option(
        "postgres_ca_file",
        Path | None,
        None,
        "Certificate authority of the servers. Without it, TLS is not used.",
    ),
    _option("postgres_cert_file", Path | None, None, "Client certificate for PostgreSQL."),
    _option("postgres_key_file", Path | None, None, "Key of PostgreSQL's client certificate."),
    _option(
        "postgres_password_file", Path | None, None, "File with the password of PostgreSQL's user."
    ),
    _option(
        "postgres_require_standby",
        bool,
        True,
        "Refuse a server without a synchronous standby.",
        "--postgres-require-standby/--no-postgres-require-standby",
    ),
    _option(
        "postgres_accept_restored",
        bool,
        False,
        "Accept once that PostgreSQL was restored elsewhere: later changes are lost.",
        "--postgres-accept-restored",
    ),
)


def with_shared_store(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `shared` of a command by the options of both kinds of store."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.name != "shared"]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        etcd, postgres = (
            {each.name.removeprefix(prefix): values.pop(each.name) for each in options}
            for prefix, options in (("etcd_", ETCD), ("postgres_", POSTGRES))
        )
        command(**values, shared=SharedStore(EtcdOptions(**etcd), PostgresOptions(**postgres)))

    # Typer reads the options from there.
    run.__dict__["__signature__"] = signature.replace(parameters=[*parameters, *ETCD, *POSTGRES])
    return run
