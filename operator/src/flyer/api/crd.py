"""`python -m flyer.api.crd`: write `crds/` from the models."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from flyer.api import names
from flyer.api.flyerjob import JOB_RULES, FlyerJob
from flyer.api.flyerquota import FlyerQuota
from flyer.api.flyertopology import FlyerTopology
from flyer.api.names import GROUP, VERSION
from flyer.api.nodehealth import NodeHealth
from flyer.api.policies import admission_policies
from flyer.api.rules import Rule, message_expression
from flyer.api.schemas import structural_schema
from flyer.api.threefscluster import NAME_RULE, ThreeFSCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel

_HEADER = "# Generated from the models in operator/src/flyer/api by `python -m flyer.api.crd`.\n"
POLICIES_FILE = "policies/admission.yaml"
# As in the CRDs that controller-gen writes. The API server accepts no description of metadata.
_API_VERSION = "Versioned schema of this representation of the object."
_KIND = "REST resource that the object represents, in CamelCase."


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: its model, its names, what kubectl prints of it."""

    model: type[BaseModel]
    kind: str
    plural: str
    short: str
    scope: str
    # name, type, path, shown only with -o wide
    columns: tuple[tuple[str, str, str, bool], ...]
    rules: tuple[Rule, ...] = ()
    categories: tuple[str, ...] = ("fireflyer",)


_AGE = ("Age", "date", ".metadata.creationTimestamp", False)
KINDS = (
    Kind(
        FlyerJob, names.KIND_JOB, names.PLURAL_JOBS, "fj", "Namespaced",
        (
            ("State", "string", ".status.phase", False),
            ("Reason", "string", ".status.reason", False),
            ("Nodes", "integer", ".spec.nodes", False),
            ("Zone", "string", ".status.zones", False),
            ("Priority", "string", ".spec.priority", False),
            ("Progress", "integer", ".status.progress.step", False),
            ("Restarts", "integer", ".status.history.restarts", False),
            _AGE,
            ("ETA", "string", ".status.pending.eta", True),
            ("Last-Ckpt", "date", ".status.checkpoint.time", True),
            ("Queue", "string", ".spec.queue", True),
        ),
        JOB_RULES,
        ("all", "fireflyer"),
    ),
    Kind(
        FlyerQuota, names.KIND_QUOTA, names.PLURAL_QUOTAS, "fq", "Cluster",
        (
            ("User", "string", ".spec.user", False),
            ("Namespace", "string", ".spec.namespace", False),
            ("Team", "string", ".spec.team", False),
            ("Queue", "string", ".spec.queue", False),
            ("Scope", "string", ".spec.scope", True),
            ("Priority", "string", ".spec.priority", False),
            ("Node-Class", "string", ".spec.nodeClass", False),
            ("Used", "integer", ".status.usedNodes", False),
            ("Nodes", "integer", ".spec.nodes", False),
            ("Expires", "string", ".spec.expiresAt", False),
            _AGE,
            ("Waiting", "integer", ".status.waitingJobs", True),
        ),
        (
            Rule(
                "self.spec.user == oldSelf.spec.user"
                " && self.spec.__namespace__ == oldSelf.spec.__namespace__"
                " && self.spec.team == oldSelf.spec.team && self.spec.queue == oldSelf.spec.queue"
                " && self.spec.scope == oldSelf.spec.scope"
                " && self.spec.priority == oldSelf.spec.priority"
                " && self.spec.nodeClass == oldSelf.spec.nodeClass",
                "spec: subject, priority and nodeClass are immutable: create another FlyerQuota",
                message_expression(
                    "spec: %s%s%s%s/%s/%s cannot replace %s%s%s%s/%s/%s: subject, scope, priority "
                    "and nodeClass are immutable, create another FlyerQuota",
                    "self.spec.user",
                    "self.spec.__namespace__",
                    "self.spec.team",
                    "self.spec.queue",
                    "self.spec.priority",
                    "self.spec.nodeClass",
                    "oldSelf.spec.user",
                    "oldSelf.spec.__namespace__",
                    "oldSelf.spec.team",
                    "oldSelf.spec.queue",
                    "oldSelf.spec.priority",
                    "oldSelf.spec.nodeClass",
                ),
                ".spec",
            ),
        ),
    ),
    Kind(
        FlyerTopology, names.KIND_TOPOLOGY, names.PLURAL_TOPOLOGIES, "ft", "Cluster",
        (
            ("Cross-Zone", "integer", ".spec.crossZoneJobs", False),
            ("Holder", "string", ".status.holder.job", False),
            ("Namespace", "string", ".status.holder.namespace", False),
            ("Epoch", "integer", ".status.epoch", True),
            _AGE,
        ),
        (
            Rule(
                f"self.metadata.name == '{names.TOPOLOGY_NAME}'",
                f"metadata.name: there is one FlyerTopology: call it {names.TOPOLOGY_NAME}",
                message_expression(
                    "metadata.name: %s is a second FlyerTopology: a cluster has one, call it "
                    f"{names.TOPOLOGY_NAME}",
                    "self.metadata.name",
                ),
            ),
        ),
    ),
    Kind(
        NodeHealth, names.KIND_HEALTH, names.PLURAL_HEALTHS, "nh", "Cluster",
        (
            ("State", "string", ".status.state", False),
            ("Reason", "string", ".status.reason", False),
            ("GPUs", "integer", ".status.inventory.gpus", False),
            ("HCAs", "integer", ".status.inventory.hcas", False),
            ("Validated", "string", ".status.validation.verdict", False),
            ("Drained-By", "string", ".spec.drain.by", False),
            _AGE,
            ("Message", "string", ".status.message", True),
            ("Since", "date", ".status.since", True),
        ),
    ),
    Kind(
        ThreeFSCluster, names.KIND_THREEFS, names.PLURAL_THREEFS, "tfs", "Namespaced",
        (
            ("Phase", "string", ".status.phase", False),
            ("Ready", "string", ".status.ready", False),
            ("Storage", "integer", ".status.storage.ready", False),
            ("Capacity", "string", ".status.capacity", False),
            ("Used", "string", ".status.used", False),
            ("Version", "string", ".status.version", False),
            _AGE,
            ("Degraded", "integer", ".status.chains.degraded", True),
            ("Unavailable", "integer", ".status.chains.unavailable", True),
        ),
        (NAME_RULE,),
    ),
)  # fmt: skip


def crd(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    model = kind.model
    fields = model.model_fields
    spec, status = (_model_of(fields[name].annotation) for name in ("spec", "status"))
    root: dict[str, Any] = {
        "type": "object",
        "description": " ".join((model.__doc__ or "").split("\n\n")[0].split()),
        "properties": {
            "apiVersion": {"type": "string", "description": _API_VERSION},
            "kind": {"type": "string", "description": _KIND},
            "metadata": {"type": "object"},
            "spec": structural_schema(spec),
            "status": structural_schema(status),
        },
    }
    if fields["spec"].is_required():
        root["required"] = ["spec"]
    else:
        root["properties"]["spec"]["default"] = {}
    if kind.rules:
        root["x-kubernetes-validations"] = [rule.to_schema() for rule in kind.rules]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": kind.scope,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short],
                "categories": list(kind.categories),
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(*column) for column in kind.columns],
                    "schema": {"openAPIV3Schema": root},
                }
            ],
        },
    }


def _model_of(annotation: Any) -> type[BaseModel]:
    """The model of a field that may be optional."""
    model = getattr(annotation, "__args__", (annotation,))[0]
    assert hasattr(model, "model_fields"), annotation
    return model  # type: ignore[no-any-return]


def _column(name: str, kind: str, path: str, wide: bool) -> dict[str, Any]:  # noqa: FBT001
    column = {"name": name.upper(), "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if wide else column


def to_yaml(*documents: dict[str, Any]) -> str:
    """The same text for the same documents."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump_all(documents, text)
    return _HEADER + text.getvalue()


def files() -> dict[str, str]:
    """Every generated file by its path in the folder."""
    crds = {f"{kind.plural}.{GROUP}.yaml": to_yaml(crd(kind)) for kind in KINDS}
    return {**crds, POLICIES_FILE: to_yaml(*admission_policies())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or report which differ with --check."""
    parser = argparse.ArgumentParser(prog="python -m flyer.api.crd", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("crds"))
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args(arguments)
    stale = []
    for name, text in files().items():
        path = options.folder / name
        if path.exists() and path.read_text() == text:
            continue
        stale.append(str(path))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if options.check and stale:
        sys.stderr.write(f"not up to date: {', '.join(stale)}; run python -m flyer.api.crd\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
