"""Store of the rows of mgmtd and meta of a ThreeFSCluster: etcd, PostgreSQL, or volumes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, model_validator

from flyer.api.base import StrictModel
from flyer.api.metadata import SUBDOMAIN
from flyer.api.rules import Rule, list_set, message_expression, rules

VOLUME_SIZE = r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$"
_ENDPOINT = r"^https?://[-A-Za-z0-9._\[\]:]+:[0-9]{1,5}$"
_HOST = r"^[-A-Za-z0-9._\[\]:]+:[0-9]{1,5}$"
_NAME = r"^[A-Za-z_][-A-Za-z0-9_.]*$"
OptionalSecret = Annotated[str, Field(max_length=253, pattern=rf"{SUBDOMAIN}|^$")]
StorageClassName = Annotated[str, Field(max_length=253, pattern=rf"{SUBDOMAIN}|^$")]


class EtcdStore(StrictModel):
    """An etcd cluster, which is not the one of Kubernetes."""

    endpoints: tuple[str, ...] = Field(
        min_length=1,
        max_length=9,
        strict=False,
        description="Address of each member: http://HOST:PORT, or https://HOST:PORT for all of "
        "them. Members run with --max-txn-ops=8192 and --max-request-bytes=8388608.",
        json_schema_extra={
            **list_set(),
            "items": {"type": "string", "maxLength": 300, "pattern": _ENDPOINT},
        },
    )
    prefix: str = Field(
        default="/3fs",
        max_length=80,
        pattern=r"^(/[-A-Za-z0-9_.]+)+$",
        description="Prefix of all keys of this 3FS. Two 3FS in one etcd cluster need different "
        'prefixes, neither of which is a folder of the other one. Immutable. Default: "/3fs".',
    )
    tls_secret: OptionalSecret = Field(
        default="",
        description="Secret with the certificate authority of the members in ca.crt. Required for "
        "https endpoints.",
    )
    client_certificate: bool = Field(
        default=False,
        description="Whether services present the certificate in tls.crt and tls.key of tlsSecret "
        "to the members.",
    )
    user: str = Field(
        default="",
        max_length=128,
        description="User of etcd. If empty, services use no user.",
    )
    password_secret: OptionalSecret = Field(
        default="",
        description="Secret with the password of the user in password. Required with user.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.endpoints.all(each, each.startsWith('https:')) ? self.tlsSecret != '' :"
                " self.endpoints.all(each, each.startsWith('http:')) && self.tlsSecret == ''",
                "spec.metadata.etcd.tlsSecret: is needed with https endpoints only, and https is "
                "for all endpoints or none: use https for all of them and set tlsSecret, or "
                "neither",
                "",
                ".tlsSecret",
            ),
            Rule(
                "!self.clientCertificate || self.tlsSecret != ''",
                "spec.metadata.etcd.clientCertificate: needs tlsSecret, which has the certificate: "
                "set tlsSecret",
                "",
                ".clientCertificate",
            ),
            Rule(
                "(self.user == '') == (self.passwordSecret == '')",
                "spec.metadata.etcd.passwordSecret: is the password of user: set both or neither",
                "",
                ".passwordSecret",
            ),
            Rule(
                "self.prefix == oldSelf.prefix",
                "spec.metadata.etcd.prefix: is immutable: create another ThreeFSCluster",
                message_expression(
                    "spec.metadata.etcd.prefix: %s cannot replace %s, where the rows are: create "
                    "another ThreeFSCluster",
                    "self.prefix",
                    "oldSelf.prefix",
                ),
                ".prefix",
            ),
        )
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        secure = [address for address in self.endpoints if address.startswith("https:")]
        if len(secure) not in (0, len(self.endpoints)):
            raise ValueError("endpoints has http and https: use https for all members")
        if bool(secure) != bool(self.tls_secret):
            raise ValueError("tlsSecret is needed with https endpoints, and only with them")
        if self.client_certificate and not self.tls_secret:
            raise ValueError("clientCertificate needs tlsSecret")
        if bool(self.user) != bool(self.password_secret):
            raise ValueError("user and passwordSecret must be set together")
        return self


class PostgresStore(StrictModel):
    """A PostgreSQL database with a synchronous standby. The operator runs no server."""

    hosts: tuple[str, ...] = Field(
        min_length=1,
        max_length=9,
        strict=False,
        description="HOST:PORT of the primary and of each standby, or of a Service that follows "
        "the primary.",
        json_schema_extra={
            **list_set(),
            "items": {"type": "string", "maxLength": 300, "pattern": _HOST},
        },
    )
    database: str = Field(
        default="threefs",
        max_length=63,
        pattern=_NAME,
        description='Database with the rows. Immutable. Default: "threefs".',
    )
    schema_: str = Field(
        default="threefs",
        alias="schema",
        max_length=50,
        pattern=r"^[a-z_][a-z0-9_]*$",
        description="Start of the names of the two schemas with the tables of this 3FS. Two 3FS in "
        'one database need different ones. Immutable. Default: "threefs".',
    )
    user: str = Field(
        default="threefs",
        max_length=63,
        pattern=_NAME,
        description="User of the services, with the privilege CREATE of the database. Default: "
        '"threefs".',
    )
    password_secret: OptionalSecret = Field(
        default="",
        description="Secret with the password of the user in password. Required without "
        "clientCertificate.",
    )
    tls_secret: OptionalSecret = Field(
        default="",
        description="Secret with the certificate authority of the servers in ca.crt. Connections "
        "then use TLS and verify the names of the servers. If empty, they are not encrypted.",
    )
    client_certificate: bool = Field(
        default=False,
        description="Whether services present the certificate in tls.crt and tls.key of tlsSecret "
        "to the servers.",
    )
    require_standby: bool = Field(
        default=True,
        description="Whether services refuse a server without a synchronous standby. The failure "
        "of such a server loses acknowledged changes. Default: true.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.passwordSecret != '' || self.clientCertificate",
                "spec.metadata.postgres.passwordSecret: is needed to authenticate, unless "
                "clientCertificate is true: set it to a Secret with the password of user",
                "",
                ".passwordSecret",
            ),
            Rule(
                "!self.clientCertificate || self.tlsSecret != ''",
                "spec.metadata.postgres.clientCertificate: needs tlsSecret, which has the "
                "certificate: set tlsSecret",
                "",
                ".clientCertificate",
            ),
            Rule(
                "!self.schema.startsWith('pg_')",
                "spec.metadata.postgres.schema: starts with pg_, which PostgreSQL reserves: use "
                "another name",
                "",
                ".schema",
            ),
            Rule(
                "self.database == oldSelf.database && self.schema == oldSelf.schema",
                "spec.metadata.postgres: database and schema are immutable: create another "
                "ThreeFSCluster",
                message_expression(
                    "spec.metadata.postgres: %s/%s cannot replace %s/%s, where the rows are: "
                    "create another ThreeFSCluster",
                    "self.database",
                    "self.schema",
                    "oldSelf.database",
                    "oldSelf.schema",
                ),
                ".schema",
            ),
        )
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.password_secret and not self.client_certificate:
            raise ValueError("passwordSecret is needed, unless clientCertificate is true")
        if self.client_certificate and not self.tls_secret:
            raise ValueError("clientCertificate needs tlsSecret")
        if self.schema_.startswith("pg_"):
            raise ValueError(f"schema {self.schema_}: names that start with pg_ are reserved")
        return self


class EmbeddedStore(StrictModel):
    """A volume for mgmtd and another one for meta, of which there is one each."""

    storage_class: StorageClassName = Field(
        default="",
        description="StorageClass of the claims. If empty, the default of the cluster is used.",
    )
    mgmtd_size: str = Field(
        default="1Gi",
        max_length=8,
        pattern=VOLUME_SIZE,
        description="Size of the volume of mgmtd. Default: 1Gi.",
    )
    meta_size: str = Field(
        default="10Gi",
        max_length=8,
        pattern=VOLUME_SIZE,
        description="Size of the volume of meta. Default: 10Gi.",
    )


class MetadataStore(StrictModel):
    """Store of the rows of mgmtd and meta: exactly one field is set."""

    etcd: EtcdStore | None = Field(
        default=None, description="Keep the rows in an etcd cluster, and permit several services."
    )
    postgres: PostgresStore | None = Field(
        default=None,
        description="Keep the rows in a PostgreSQL database, and permit several services.",
    )
    embedded: EmbeddedStore | None = Field(
        default=None,
        description="Keep the rows on volumes of the one mgmtd and the one meta. Immutable.",
    )

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "[has(self.etcd), has(self.postgres), has(self.embedded)]"
                ".filter(set, set).size() == 1",
                "spec.metadata: has one store: set either etcd, postgres or embedded",
            ),
            Rule(
                "has(self.etcd) == has(oldSelf.etcd) && "
                "has(self.postgres) == has(oldSelf.postgres) && (!has(self.embedded) || "
                "!has(oldSelf.embedded) || self.embedded == oldSelf.embedded)",
                "spec.metadata: the rows stay where they are: create another ThreeFSCluster to "
                "use another store or other volumes",
            ),
        )
    )

    @model_validator(mode="after")
    def _one_store(self) -> Self:
        if [self.etcd, self.postgres, self.embedded].count(None) != 2:
            raise ValueError("set either etcd, postgres or embedded")
        return self


__all__ = [
    "VOLUME_SIZE",
    "EmbeddedStore",
    "EtcdStore",
    "MetadataStore",
    "PostgresStore",
    "StorageClassName",
]
