"""Plans: the part of each module of a model in tensor parallelism, and checks that it fits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

__all__ = [
    "HUGGING_FACE",
    "LLAMA",
    "Plan",
    "PlanError",
    "SizeError",
    "check_length",
    "check_sizes",
    "parts_of",
]

NAMED_MAX: Final = 5
"""Modules that a message names before it counts the others."""


class PlanError(ValueError):
    """A plan that does not fit a model; `names` are the modules or patterns."""

    def __init__(self, problem: str, remedy: str, names: tuple[str, ...]) -> None:
        shown = ", ".join(names[:NAMED_MAX])
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        super().__init__(f"{problem}: {shown}{more}: {remedy}")
        self.names = names


class SizeError(ValueError):
    """A size that the ranks do not divide; `name` is the module's."""

    def __init__(self, name: str, what: str, size: int, ranks: int, remedy: str) -> None:
        super().__init__(f"{name}: {what} {size} does not divide into {ranks} ranks: {remedy}")
        self.name, self.what, self.size, self.ranks = name, what, size, ranks


@dataclass(frozen=True, slots=True)
class Plan:
    """Patterns of module names; `*` matches any characters, also dots.

    Every module that has parameters matches one pattern.
    """

    columns: tuple[str, ...] = ()
    """Linear layers whose outputs are divided: query, key, value; gate and up."""
    rows: tuple[str, ...] = ()
    """Linear layers whose inputs are divided: the output of the attention; down."""
    norms: tuple[str, ...] = ()
    """Norms before these layers and before the head, each read by nothing else; also norms without
    parameters."""
    embedding: tuple[str, ...] = ()
    """The embedding of tokens, divided by token."""
    head: tuple[str, ...] = ()
    """The linear layer from the last norm to the logits, divided by token."""
    replicated: tuple[str, ...] = ()
    """Modules that every rank has and computes as before. Not with `sequence`."""
    heads: tuple[str, ...] = ()
    """Those of `columns` that are divided between attention heads."""


LLAMA: Final = Plan(
    columns=("*attention.w[qkv]", "*feed_forward.w[13]"),
    rows=("*attention.wo", "*feed_forward.w2"),
    norms=("*attention_norm", "*ffn_norm", "norm"),
    embedding=("tok_embeddings",),
    head=("output",),
    heads=("*attention.w[qkv]",),
)
"""Names of Meta's models."""

HUGGING_FACE: Final = Plan(
    columns=("*self_attn.[qkv]_proj", "*mlp.gate_proj", "*mlp.up_proj"),
    rows=("*self_attn.o_proj", "*mlp.down_proj"),
    norms=("*input_layernorm", "*post_attention_layernorm", "*model.norm"),
    embedding=("*embed_tokens",),
    head=("lm_head",),
    heads=("*self_attn.[qkv]_proj",),
)
"""Names of Hugging Face's Llama, Mistral and Qwen2 models."""


def parts_of(model: nn.Module, plan: Plan, *, sequence: bool = False) -> dict[str, str]:
    """The part of each module that has parameters, and of norms without."""
    owners = [
        n for n, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None
    ]
    unmatched: list[str] = []
    parts: dict[str, str] = {}
    used: set[str] = set()
    for name in owners:
        matches = [
            (field.name, pattern)
            for field in fields(plan)
            if field.name != "heads"
            for pattern in getattr(plan, field.name)
            if fnmatchcase(name, pattern)
        ]
        if not matches:
            unmatched.append(name or "the model itself")
        elif len({part for part, _ in matches}) > 1:
            raise PlanError(
                f"{name} matches several parts of the plan",
                "make the patterns narrower",
                tuple(f"{part} {pattern!r}" for part, pattern in matches),
            )
        else:
            parts[name] = matches[0][0]
            used.update(pattern for _, pattern in matches)
    if unmatched:
        raise PlanError(
            "modules with parameters have no place in the plan",
            "name them in columns, rows, norms or replicated",
            tuple(unmatched),
        )
    for name, pattern in _bare_norms(model, plan, parts):
        parts[name] = "norms"
        used.add(pattern)
    _check_tied(model, parts)
    _check_inner(model, parts)
    every = [
        p for field in fields(plan) if field.name != "heads" for p in getattr(plan, field.name)
    ]
    if unused := tuple(repr(pattern) for pattern in every if pattern not in used):
        raise PlanError(
            "patterns of the plan match no module with parameters, and no norm",
            "correct them",
            unused,
        )
    if sequence and (kept := tuple(name for name, part in parts.items() if part == "replicated")):
        raise PlanError(
            "modules that are replicated would see a part of the sequence",
            "parallelize without sequence",
            kept,
        )
    return parts


def _bare_norms(model: nn.Module, plan: Plan, parts: dict[str, str]) -> list[tuple[str, str]]:
    """Norms without parameters and their patterns; what is inside of a norm is not another one."""
    norms = tuple(f"{name}." for name, part in parts.items() if part == "norms")
    return [
        (name, pattern)
        for name, module in model.named_modules()
        if not [*module.children(), *module.parameters()] and not name.startswith(norms)
        for pattern in plan.norms
        if fnmatchcase(name, pattern)
    ]


def _check_inner(model: nn.Module, parts: dict[str, str]) -> None:
    """Refuses modules that would see this rank's columns alone, for example norms of queries.

    Their gradients would be those of some columns, different on each rank. Where norms of the
    input are next to the linear layers, the size of the weight distinguishes them.
    """
    inputs: dict[str, set[int]] = {}
    for name, part in parts.items():
        if part == "columns":
            module: Any = model.get_submodule(name)
            size = getattr(module, "in_features", 0)
            inputs.setdefault(name[: name.rfind(".") + 1], set()).add(size)
    inner = [
        name
        for name, part in parts.items()
        for parent, sizes in inputs.items()
        if name.startswith(parent)
        and (
            part == "replicated"
            or (part == "norms" and not sizes.issuperset(_sizes(model.get_submodule(name))))
        )
    ]
    if inner:
        raise PlanError(
            "modules next to layers with divided columns would work on the columns of one rank, "
            "which is not supported",
            "list all of that module and the norm before it as replicated",
            tuple(dict.fromkeys(inner)),
        )


def _sizes(module: nn.Module) -> set[int]:
    return {parameter.numel() for parameter in module.parameters(recurse=False)}


def _check_tied(model: nn.Module, parts: dict[str, str]) -> None:
    """Refuses parameters of several modules: each module would get a separate one."""
    owner: dict[int, str] = {}
    for name, part in parts.items():
        for parameter in model.get_submodule(name).parameters(recurse=False):
            other = owner.setdefault(id(parameter), name)
            if other != name and {parts[other], part} != {"replicated"}:
                raise PlanError(
                    "modules share a parameter, which would be separate after this",
                    "give each its own parameter, or list both as replicated",
                    (other, name),
                )


def check_sizes(
    model: nn.Module, plan: Plan, parts: dict[str, str], ranks: int, head_width: int | None
) -> None:
    """Raises for the first module that cannot be divided into these ranks."""
    for name, part in parts.items():
        module: Any = model.get_submodule(name)
        if part in {"columns", "rows", "head"} and not isinstance(module, nn.Linear):
            raise PlanError(
                f"{part} are linear layers, and these are not", "correct the plan", (name,)
            )
        if part == "embedding" and not _is_plain_embedding(module):
            raise PlanError(
                "embeddings are nn.Embedding without max_norm, scale_grad_by_freq and sparse, and "
                "these are not",
                "correct the plan, or list them as replicated",
                (name,),
            )
        if part in {"columns", "head"}:
            _divides(name, "out_features", module.out_features, ranks)
        elif part == "rows":
            _divides(name, "in_features", module.in_features, ranks)
        elif part == "embedding":
            _divides(name, "num_embeddings", module.num_embeddings, ranks)
        if head_width is not None and any(fnmatchcase(name, p) for p in plan.heads):
            count, remainder = divmod(module.out_features, head_width)
            if remainder:
                raise ValueError(
                    f"{name}: out_features {module.out_features} is not a multiple of head_width "
                    f"{head_width}: pass the size of one head"
                )
            _divides(name, "number of heads", count, ranks)


def _is_plain_embedding(module: Any) -> bool:
    """Whether the rows that a rank looks up depend on nothing else."""
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not (module.scale_grad_by_freq or module.sparse)


def _divides(name: str, what: str, size: Any, ranks: int) -> None:
    if size % ranks:
        raise SizeError(
            name, what, size, ranks, "choose a multiple, by padding for example, or a smaller tp"
        )


def check_length(inputs: tuple[Any, ...], ranks: int) -> None:
    """Raises if the sequences of a model's input do not divide into the ranks."""
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim() > 1:
        length = inputs[0].shape[1]
        if length % ranks:
            raise SizeError("input", "length", length, ranks, "pad the sequences")
