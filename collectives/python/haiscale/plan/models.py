"""Sizes of transformer models, by name or from fields."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODELS", "Model", "ModelError"]

SIZE_MAX: Final = 10**9
"""Largest value of a field; products of all fields stay in the range of a float."""


class ModelError(ValueError):
    """An invalid model. `field` is the name of the field, or empty."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder-only transformer and its batch."""

    layers: int
    width: int
    """Size of the hidden state."""
    heads: int
    vocabulary: int
    batch: int
    """Sequences of a step, over all ranks."""
    context: int
    """Tokens of a sequence."""
    name: str = "model"
    feed_forward: int = 0
    """Inner size of the feed-forward part. Default: 4 times the width."""
    gated: bool = False
    """Whether the feed-forward part has a gate: three matrices, not two."""
    tied: bool = False
    """Whether the output uses the matrix of the embedding."""
    experts: int = 0
    """Routed experts of a layer; 0: a dense model."""
    experts_per_token: int = 2
    expert_width: int = 0
    """Inner size of an expert. Default: `feed_forward`."""
    shared_experts: int = 0
    """Experts that every token visits."""
    dense_layers: int = 0
    """Layers without experts, of a model that has them."""

    def __post_init__(self) -> None:
        """Fills defaults in and refuses sizes that are not a model."""
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
                raise ModelError(field.name, f"invalid {field.name} {value!r}: not a whole number")
            if kind != "int" and type(value).__name__ != kind:
                raise ModelError(field.name, f"invalid {field.name} {value!r}: expected a {kind}")
            least = 1 if field.name in _NEEDED or field.name == "experts_per_token" else 0
            if kind == "int" and not least <= value <= SIZE_MAX:
                expected = f"{least} to {SIZE_MAX}"
                raise ModelError(field.name, f"invalid {field.name} {value}: expected {expected}")
        if self.feed_forward == 0:
            object.__setattr__(self, "feed_forward", 4 * self.width)
        if self.expert_width == 0:
            object.__setattr__(self, "expert_width", self.feed_forward)
        if self.width % self.heads:
            raise ModelError(
                "heads", f"invalid heads {self.heads}: they do not divide the width {self.width}"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise ModelError(
                "experts_per_token",
                f"invalid experts_per_token {self.experts_per_token}: the model has {self.experts}",
            )
        if self.dense_layers > self.layers:
            raise ModelError(
                "dense_layers",
                f"invalid dense_layers {self.dense_layers}: the model has {self.layers} layers",
            )

    @classmethod
    def of(cls, values: Mapping[str, Any], name: str) -> Model:
        """A model from the fields of a file.

        Raises:
            ModelError: A field is unknown, missing or invalid.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {close[0]}?" if close else f"expected {', '.join(known)}"
                raise ModelError(str(key), f"unknown field {key!r}: {hint}")
        if missing := [key for key in _NEEDED if key not in values]:
            raise ModelError(missing[0], f"missing field {missing[0]!r}: it has no default")
        return cls(**({"name": name} | dict(values)))

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def expert_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.width

    @property
    def dense_parameters(self) -> int:
        """Parameters of all layers that are not those of routed experts."""
        attention = 4 * self.width**2 * self.layers
        plain = (self.layers - self.expert_layers) * self._feed_forward(self.feed_forward)
        shared = self.shared_experts * self._feed_forward(self.expert_width) + (
            self.experts * self.width
        )
        return attention + plain + self.expert_layers * shared + 2 * self.width * self.layers

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts."""
        return self.expert_layers * self.experts * self._feed_forward(self.expert_width)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return (
            self.dense_parameters
            + self.expert_parameters
            + self.embedding * (1 if self.tied else 2)
        )

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes through, with the output matrix."""
        routed = self.experts_per_token * self._feed_forward(self.expert_width)
        return self.dense_parameters + self.expert_layers * routed + self.embedding

    @property
    def forward_operations(self) -> float:
        """Floating-point operations of the forward pass of one sequence."""
        attention = 2 * self.layers * self.width * self.context  # causal: half of the scores
        return self.context * (2.0 * self.active_parameters + attention)

    @property
    def activation_bytes(self) -> float:
        """Memory that one token needs in an average layer until its backward pass, in 16 bits.

        Inputs and outputs of the norms, queries, keys, values, the output of the attention and the
        residuals: 8 times the width. Inner values of the feed-forward part, before and after the
        activation, and the product with the gate. The scores are computed again.
        """
        inner = self.matrices * self.feed_forward
        routed = self.matrices * self.expert_width * (self.experts_per_token + self.shared_experts)
        routed += 2 * self.width * self.experts_per_token  # copies that are sent and returned
        share = self.expert_layers / self.layers
        return 2.0 * (8 * self.width + (1 - share) * inner + share * routed)

    def _feed_forward(self, inner: int) -> int:
        return self.matrices * self.width * inner


_NEEDED: Final = ("layers", "width", "heads", "vocabulary", "batch", "context")

MODELS: Final = {
    model.name: model
    for model in (
        Model(
            name="gpt2-medium", layers=24, width=1024, heads=16, vocabulary=50257, tied=True,
            batch=512, context=1024,
        ),
        Model(
            name="llama-7b", layers=32, width=4096, heads=32, vocabulary=32000,
            feed_forward=11008, gated=True, batch=2048, context=2048,
        ),
        Model(
            name="llama-13b", layers=40, width=5120, heads=40, vocabulary=32000,
            feed_forward=13824, gated=True, batch=2048, context=2048,
        ),
        Model(
            name="deepseekmoe-16b", layers=28, width=2048, heads=16, vocabulary=102400,
            feed_forward=10944, gated=True, experts=64, experts_per_token=6, expert_width=1408,
            shared_experts=2, dense_layers=1, batch=4608, context=4096,
        ),
    )
}  # fmt: skip
"""Named models, with the batches of the paper's figures where it has them."""
