"""The cases of the rules of ThreeFSCluster; see `rule_cases`."""

from __future__ import annotations

from typing import Any

from .rule_cases import Case, Json


def threefs(**spec: Any) -> Json:
    etcd = {"endpoints": ["http://etcd-0:2379"]}
    return {"spec": {"image": "r/threefs:1", "metadata": {"etcd": etcd}, **spec}}


POSTGRES = {"hosts": ["pg-rw:5432"], "passwordSecret": "pg-user"}


def on_cluster(name: str, message: str, edit: Json, at: str | None = None, **before: Any) -> Case:
    return Case(name, "threefsclusters", {"spec": edit}, message, threefs(**before), at=at)


THREEFS_CASES = [
    on_cluster(
        "fewer services than replicas of a chunk",
        "spec.storage.replicas: 2 is less than replication 3: raise it, the replicas of a chunk "
        "are on different services",
        {"storage": {"replicas": 2}},
    ),
    on_cluster(
        "another replication",
        "spec.storage.replication: 2 cannot replace 3, with which chains were created: create "
        "another ThreeFSCluster",
        {"storage": {"replication": 2}},
    ),
    on_cluster(
        "another number of chains",
        "spec.storage.chainsPerNode: 8 cannot replace 4, with which chains were created: create "
        "another ThreeFSCluster",
        {"storage": {"chainsPerNode": 8}},
    ),
    on_cluster(
        "another number of disks",
        "spec.storage.disks: is immutable, as the claims of a StatefulSet are: create another "
        "ThreeFSCluster",
        {"storage": {"disks": 2}},
    ),
    on_cluster(
        "larger claims of a StatefulSet",
        "spec.storage.volume: is immutable, as the claims of a StatefulSet are: create another "
        "ThreeFSCluster",
        {"storage": {"volume": {"size": "200Gi"}}},
    ),
    on_cluster(
        "two stores of metadata",
        "spec.metadata: has one store: set either etcd, postgres or embedded",
        {"metadata": {"embedded": {}}},
    ),
    on_cluster(
        "another store of metadata",
        "spec.metadata: the rows stay where they are: create another ThreeFSCluster to use "
        "another store or other volumes",
        {"metadata": {"etcd": None, "embedded": {}}},
    ),
    on_cluster(
        "another prefix in etcd",
        "spec.metadata.etcd.prefix: /other cannot replace /3fs, where the rows are: create another "
        "ThreeFSCluster",
        {"metadata": {"etcd": {"prefix": "/other"}}},
    ),
    on_cluster(
        "https without a certificate authority",
        "spec.metadata.etcd.tlsSecret: is needed with https endpoints only, and https is for all "
        "endpoints or none: use https for all of them and set tlsSecret, or neither",
        {"metadata": {"etcd": {"endpoints": ["https://etcd-0:2379"]}}},
    ),
    on_cluster(
        "a client certificate without its Secret",
        "spec.metadata.etcd.clientCertificate: needs tlsSecret, which has the certificate: set "
        "tlsSecret",
        {"metadata": {"etcd": {"clientCertificate": True}}},
    ),
    on_cluster(
        "a user without a password",
        "spec.metadata.etcd.passwordSecret: is the password of user: set both or neither",
        {"metadata": {"etcd": {"user": "threefs"}}},
    ),
    on_cluster(
        "rows from etcd to PostgreSQL",
        "spec.metadata: the rows stay where they are: create another ThreeFSCluster to use "
        "another store or other volumes",
        {"metadata": {"etcd": None, "postgres": POSTGRES}},
    ),
    on_cluster(
        "rows from PostgreSQL to volumes",
        "spec.metadata: the rows stay where they are: create another ThreeFSCluster to use "
        "another store or other volumes",
        {"metadata": {"postgres": None, "embedded": {}}},
        metadata={"postgres": POSTGRES},
    ),
    on_cluster(
        "etcd and PostgreSQL",
        "spec.metadata: has one store: set either etcd, postgres or embedded",
        {"metadata": {"postgres": POSTGRES}},
    ),
    on_cluster(
        "PostgreSQL without a password",
        "spec.metadata.postgres.passwordSecret: is needed to authenticate, unless "
        "clientCertificate is true: set it to a Secret with the password of user",
        {"metadata": {"postgres": {"passwordSecret": ""}}},
        metadata={"postgres": POSTGRES},
    ),
    on_cluster(
        "a certificate for PostgreSQL without its Secret",
        "spec.metadata.postgres.clientCertificate: needs tlsSecret, which has the certificate: set "
        "tlsSecret",
        {"metadata": {"postgres": {"clientCertificate": True}}},
        metadata={"postgres": POSTGRES},
    ),
    Case(
        "a schema that PostgreSQL reserves",
        "threefsclusters",
        {},
        "spec.metadata.postgres.schema: starts with pg_, which PostgreSQL reserves: use another "
        "name",
        threefs(metadata={"postgres": {**POSTGRES, "schema": "pg_3fs"}}),
    ),
    on_cluster(
        "another schema in PostgreSQL",
        "spec.metadata.postgres: threefs/other cannot replace threefs/threefs, where the rows are: "
        "create another ThreeFSCluster",
        {"metadata": {"postgres": {"schema": "other"}}},
        "spec.metadata.postgres.schema",
        metadata={"postgres": POSTGRES},
    ),
    on_cluster(
        "another database in PostgreSQL",
        "spec.metadata.postgres: other/threefs cannot replace threefs/threefs, where the rows are: "
        "create another ThreeFSCluster",
        {"metadata": {"postgres": {"database": "other"}}},
        "spec.metadata.postgres.schema",
        metadata={"postgres": POSTGRES},
    ),
    on_cluster(
        "two metadata services on one volume",
        "spec.metadata.embedded: is used by one mgmtd and one meta: set mgmtd.replicas and "
        "meta.replicas to 1, or use etcd or postgres",
        {"meta": {"replicas": 2}},
        metadata={"embedded": {}},
    ),
    Case(
        "a name too long for a label",
        "threefsclusters",
        {},
        f"metadata.name: {'x' * 64} (64 characters) must be at most 63 characters: it is the "
        "value of a label",
        threefs(),
        fixed_name="x" * 64,
        at="",
    ),
]
