"""Commands that the pages show for a cluster: verbs, flags and JSON paths are real ones.

Nothing runs. `flyer` is asked whether it would take the words; of kubectl, helm and kind the verbs
and flags are known here, so that a page cannot bring in one by a slip of the hand.
"""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from typing import Any

import pytest
from flyer.cli.arguments import read
from flyer.cli.verbs import VERBS
from ruamel.yaml import YAML

from tests.doc_blocks import ROOT, Block, blocks

SHELL = [block for block in blocks("cluster", "skip") if block.language == "sh"]
ENDS = {"|", "||", "&&", ";"}

EVERYWHERE = {"-n", "--namespace", "-l", "--selector", "-o", "--output", "--all-namespaces", "-A"}
KUBECTL: dict[str, set[str]] = {
    "annotate": {"--overwrite"},
    "apply": {"-f"},
    "cordon": set(),
    "create": {"-f", "--from-file", "--from-literal", "--clusterrole", "--group", "--hard"},
    "delete": {"--all", "-f", "--wait"},
    "describe": set(),
    "exec": {"-c"},
    "get": {
        "-w", "-L", "--raw", "--field-selector", "--sort-by", "--no-headers", "--show-labels", "-f",
    },
    "label": {"--overwrite"},
    "logs": {"-c", "-f", "--tail", "--all-containers", "--prefix", "--previous"},
    "patch": {"-p", "--patch", "--type"},
    "rollout": set(),
    "taint": set(),
    "top": {"--containers"},
    "uncordon": set(),
    "wait": {"--for", "--timeout", "--all"},
}  # fmt: skip
HELM = {
    "rollback": {"--namespace", "--wait", "--timeout"},
    "uninstall": {"--namespace", "--wait", "--timeout"},
    "status": {"--namespace"},
    "history": {"--namespace"},
}
KIND = {"create": {"--name", "--config"}, "delete": {"--name"}, "load": {"--name"}}
OUTPUTS = re.compile(r"(wide|yaml|json|name|jsonpath=.+)\Z", re.DOTALL)
PLURALS = {
    "flyerjob": "flyerjobs", "flyertopology": "flyertopologies", "flyerquota": "flyerquotas",
    "nodehealth": "nodehealths",
}  # fmt: skip
KNOWN_PATHS = {
    "lease": {"spec.leaseTransitions", "spec.holderIdentity", "spec.renewTime"},
    "mutatingwebhookconfiguration": {"webhooks.clientConfig.caBundle"},
}
"""Fields of kinds that are not ours."""


def commands(text: str) -> list[list[str]]:
    """Every simple command of a block, also behind pipes."""
    result: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        result.append([])
        for word in lexer:
            if word in ENDS:
                result.append([])
            else:
                result[-1].append(word)
    return [match for match in result if match]


def flags(words: list[str]) -> list[str]:
    """The flags among words, without values; arguments after `--` are those of another program."""
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if re.match(r"--?[a-zA-Z]", word)]


def paths(template: str) -> list[str]:
    """The fields that a JSONPath template reads, as dotted names."""
    result = []
    for part in re.findall(r"\{([^{}]*)\}", template):
        if part.startswith('"'):
            continue
        assert part.startswith("."), f"{part}: a path starts with a dot"
        result.append(re.sub(r"\[[^\]]*\]", "", part).lstrip("."))
    rest = re.sub(r"\{[^{}]*\}", "", template)
    assert not set("{}") & set(rest), f"{template}: braces that do not match"
    return result


def has_field(plural: str, path: str) -> bool:
    [file] = (ROOT / "crds").glob(f"*{plural}*.yaml")
    definition = YAML(typ="safe").load(file)
    [version] = [item for item in definition["spec"]["versions"] if item["storage"]]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        if name == "metadata":
            return True
        schema = schema.get("items", schema)
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            return False
    return True


def check_kubectl(words: list[str]) -> None:
    rest = list(words)
    while rest[0] in {"-n", "--namespace"}:
        rest = rest[2:]
    verb = rest[0]
    assert verb in KUBECTL, f"kubectl {verb}"
    unknown = set(flags(rest[1:])) - KUBECTL[verb] - EVERYWHERE
    assert not unknown, f"kubectl {verb}: {unknown}"
    for flag, value in pairwise(rest):
        if flag in {"-o", "--output"}:
            assert OUTPUTS.match(value), value
            if value.startswith("jsonpath="):
                check_paths(rest[1], value.removeprefix("jsonpath="))


def check_paths(kind: str, template: str) -> None:
    for path in paths(template):
        plural = PLURALS.get(kind, kind)
        if plural in PLURALS.values():
            assert has_field(plural, path), f"{kind} has no {path}"
        else:
            assert path in KNOWN_PATHS[kind], f"{kind} has no {path}"


def check_flyer(words: list[str]) -> None:
    [verb] = [item for item in VERBS if item.name == words[0]]
    read("flyer", verb, words[1:])


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_have_verbs_and_flags_that_exist(block: Block) -> None:
    for program, *words in commands(block.text):
        match program:
            case "flyer":
                check_flyer(words)
            case "kubectl" if words[:1] == ["flyer"]:
                check_flyer(words[1:])
            case "kubectl":
                check_kubectl(words)
            case "helm" if words[0] in HELM:
                assert set(flags(words)) <= HELM[words[0]]
            case "kind":
                assert set(flags(words)) <= KIND[words[0]]


@pytest.mark.parametrize(
    "text",
    [
        "kubectl gett pods",
        "kubectl get pods --watsh",
        "kubectl get flyerjob x -o jsonpath='{.status.pendign}'",
        "kubectl get flyerjob x -o jsonpath='{.status.pending'",
        "kubectl get pods -o jason",
        "flyer logs JOB --tial 3",
        "true | kubectl gett pods",
    ],
)
def test_a_mistake_in_a_command_is_detected(text: str) -> None:
    block = Block(ROOT / "docs" / "x.md", 1, "sh", "cluster", "", text)
    with pytest.raises(Exception, match=r"."):
        test_commands_have_verbs_and_flags_that_exist(block)
