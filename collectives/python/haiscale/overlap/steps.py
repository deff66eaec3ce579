"""The optimizer's step of a bucket as soon as its gradients are averaged.

`optimizer.step()` stays the request. A hook before it takes the parameters away from torch's own
step; afterwards each bucket is stepped by the same optimizer, with its class's `step`, restricted
to the bucket's parameters and with the hyperparameters of the request. So state, `state_dict` and
bits are those of one step over everything: the optimizers listed here treat parameters one by one.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import optim
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from haiscale.overlap.guards import plain
from haiscale.trace import recorder
from haiscale.trace.spans import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from haiscale.overlap.flight import Flight, GradientBucket

__all__ = ["ELEMENTWISE", "Steps", "WholeStep", "observe_steps"]

ELEMENTWISE: Final = frozenset(
    {
        optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad,
        optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
    }
)  # fmt: skip
"""Classes (not their subclasses) whose update of an element depends on that element alone."""

INDEPENDENT: Final = ELEMENTWISE | {optim.Adafactor, optim.Muon}
"""Classes (not their subclasses) whose update of a parameter depends on that parameter alone."""

OWN_HOOKS: Final = 2
"""Hooks of one `Steps`. With another wrapper's of the same optimizer there are more."""

_LOG = logging.getLogger("haiscale")


class WholeStep(StrEnum):
    """Why a step is made once, after all gradients are averaged, instead of bucket by bucket."""

    OVERLAP_OFF = "OverlapOff"
    NOT_INDEPENDENT = "NotIndependent"
    CLOSURE = "Closure"
    GRAD_SCALER = "GradScaler"
    STEP_HOOKS = "StepHooks"
    TORCH_COLLECTIVES = "TorchCollectives"
    OTHER_OPTIMIZER = "OtherOptimizer"
    GRADIENTS_READ = "GradientsRead"


_MEANING: Final = {
    WholeStep.OVERLAP_OFF: "overlap=False was passed",
    WholeStep.NOT_INDEPENDENT: "{name} is not known to update parameters independently of each "
    "other; pass independent=True to overlap() if it does",
    WholeStep.CLOSURE: "step() was called with a closure, which needs all gradients",
    WholeStep.GRAD_SCALER: "a GradScaler may skip the step, which needs all gradients",
    WholeStep.STEP_HOOKS: "{name} has step hooks, which need all parameters",
    WholeStep.TORCH_COLLECTIVES: "gradients are averaged by torch's own collectives",
    WholeStep.OTHER_OPTIMIZER: "parameters of the model have no optimizer that was passed to "
    "overlap(), or one whose steps cannot be split",
    WholeStep.GRADIENTS_READ: "the gradients were read, clipped or unscaled before step(), which "
    "needs all of them",
}


class Steps:
    """An optimizer whose steps follow the collectives of a flight's buckets."""

    independent = INDEPENDENT
    """Optimizers whose step may be split."""
    at_once: frozenset[WholeStep] = frozenset()
    """Reasons for which a whole step is made by `_run`, too, instead of torch's own call."""

    def __init__(
        self,
        optimizer: Optimizer,
        flight: Flight[Any],
        *,
        never: WholeStep | None = None,
        independent: bool = False,
        log: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.whole: WholeStep | None = None
        """Why the last step was made at once; None if it was split."""
        self._flight = flight
        self._logs = log
        self._logged: set[WholeStep] = set()
        self._held: list[dict[str, Any]] | None = None
        self._is_running = False
        if never is None and not independent and type(optimizer) not in self.independent:
            never = WholeStep.NOT_INDEPENDENT
        self._note(never)
        self.never = never
        """Why no step of this optimizer can be split; None if steps can be."""
        self.handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_pre_hook(lambda _: flight.synchronize()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: flight.synchronize()),
        ]

    def parameters(self) -> set[Parameter]:
        """All that the optimizer has."""
        return {p for group in self.optimizer.param_groups for p in plain(group["params"])}

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_running:
            return
        if self._held is not None:  # another hook raised
            optimizer.param_groups, self._held = self._held, None
        flight = self._flight
        flight.check()
        why = self._why_whole(args, kwargs)
        flight.request_step()
        self._note(why)
        if why is not None:
            flight.synchronize()
        if why is None or why in self.at_once:
            self._held, optimizer.param_groups = optimizer.param_groups, []
        if why is WholeStep.CLOSURE:
            flight.defers = False

    def _why_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeStep | None:
        if self.never is not None:
            return self.never
        if args[1:] or kwargs.get("closure") is not None:
            return WholeStep.CLOSURE
        scaled = (kwargs.get("grad_scaler"), getattr(self.optimizer, "found_inf", None))
        if any(each is not None for each in scaled):
            return WholeStep.GRAD_SCALER
        if _hooks(self.optimizer) != OWN_HOOKS:
            return WholeStep.STEP_HOOKS
        if not self._flight.may_defer:
            return WholeStep.OTHER_OPTIMIZER
        return None if self._flight.has_unread else WholeStep.GRADIENTS_READ

    def _note(self, why: WholeStep | None) -> None:
        self.whole = why
        if why is not None and why not in self._logged:
            self._logged.add(why)
            if self._logs and why not in {WholeStep.OVERLAP_OFF, WholeStep.TORCH_COLLECTIVES}:
                meaning = _MEANING[why].format(name=type(self.optimizer).__name__)
                _LOG.warning("optimizer steps wait for all gradients: %s: %s", why.value, meaning)

    def _after(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        if self._is_running:
            return
        self._flight.defers = self._flight.may_defer
        if self._held is None:
            return
        held, self._held = self._held, None
        optimizer.param_groups = held
        terms = [_terms(group) for group in held]
        group_of = {p: i for i, group in enumerate(held) for p in plain(group["params"])}
        hidden = {id(each) for bucket in self._flight.in_flight for each in bucket.in_flight}
        # Of another model, or gradients of the script's own; first, since the optimizer may raise.
        others = [
            (group, p, p.grad)
            for p, group in group_of.items()
            if p.grad is not None and id(p.grad) not in hidden
        ]
        if others:
            self._run(terms, others)
        for bucket in self._flight.in_flight:
            self._plan(bucket, group_of, terms)
        self._flight.settle_landed()

    def _plan(
        self,
        bucket: GradientBucket,
        group_of: dict[Parameter, int],
        terms: Sequence[dict[str, Any]],
    ) -> None:
        """Adds this step of a bucket's parameters to what happens once it has landed."""
        due: list[tuple[int, int]] = []
        for place, parameter in enumerate(bucket.parameters):
            if parameter in group_of and parameter.grad is bucket.in_flight[place]:
                due.append((group_of.pop(parameter), place))
                parameter.grad = None
                bucket.unread = max(0, bucket.unread - 1)

        def step(averages: Sequence[Tensor | None]) -> None:
            rows = [(group, bucket.parameters[place], averages[place]) for group, place in due]
            self._run(terms, rows)

        if due:
            bucket.steps.append(step)

    def _run(
        self,
        terms: Sequence[dict[str, Any]],
        rows: Sequence[tuple[int, Parameter, Tensor | None]],
    ) -> None:
        """The optimizer's own step, for some parameters with their gradients."""
        optimizer, groups = self.optimizer, optimizer_groups(terms, rows)
        held, optimizer.param_groups = optimizer.param_groups, groups
        before = [parameter.grad for _, parameter, _ in rows]
        for _, parameter, gradient in rows:
            parameter.grad = gradient
        device = rows[0][1].device.type
        self._is_running = True
        traced = recorder.span(Kind.OPTIMIZER, f"step of {len(rows)} parameters")
        try:
            # It may run inside a forward pass: in its modes the state would get other types.
            with torch.inference_mode(mode=False), torch.autocast(device, enabled=False), traced:
                step: Any = type(optimizer).step
                step(optimizer)
                self._check_groups(groups, terms)
        finally:
            self._is_running = False
            optimizer.param_groups = held
            for (_, parameter, _), gradient in zip(rows, before, strict=True):
                parameter.grad = gradient

    def _check_groups(
        self, groups: Sequence[dict[str, Any]], terms: Sequence[dict[str, Any]]
    ) -> None:
        """Raises if the step has changed a hyperparameter: the other buckets would not see it."""
        known = [{id(value) for value in each.values()} for each in terms]
        for group in groups:
            values = {id(value) for name, value in group.items() if name != "params"}
            if not any(values <= each for each in known):
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} changes its parameter groups in a step: pass "
                    "it without independent=True"
                )


def optimizer_groups(
    terms: Sequence[dict[str, Any]], rows: Sequence[tuple[int, Parameter, Tensor | None]]
) -> list[dict[str, Any]]:
    """Parameter groups with the given terms and some of their parameters."""
    chosen: dict[int, list[Parameter]] = {}
    for group, parameter, _ in rows:
        chosen.setdefault(group, []).append(parameter)
    return [{**terms[group], "params": chosen[group]} for group in sorted(chosen)]


def _terms(group: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters at the time of the request: a scheduler may change them before the step."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


class _Observer:
    """A hook that reads the optimizer alone, so steps are split in its presence."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[Optimizer], None]) -> None:
        self._call = call

    def __call__(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        self._call(optimizer)


def observe_steps(call: Callable[[Optimizer], None]) -> RemovableHandle:
    """Calls before each step of any optimizer; the call changes neither it nor its parameters."""
    return register_optimizer_step_pre_hook(_Observer(call))


def _hooks(optimizer: Any) -> int:
    """Number of hooks around the optimizer's step, those for all optimizers but observers too."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    every = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return sum(map(len, own)) + sum(not isinstance(hook, _Observer) for hook in every)
