"""The optimizer of a policy, with master weights, loss scale, clipping and schedule; skips nonfinite gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.muon import Muon
from lucidrl.models.parameter_groups import ParameterGroup, WeightInfo, grouped
from lucidrl.models.policy.config import HALF_PRECISIONS, MUON, SCHEDULES, OptimizationConfig
from lucidrl.utils.imports import import_object
from lucidrl.utils.suggestions import check_arguments

_FIRST_LOSS_SCALE, _LARGEST_LOSS_SCALE, _STEPS_PER_LOSS_SCALE = 2.0**12, 2.0**16, 200
FUSED_BY_DEFAULT = ("torch.optim.AdamW", "torch.optim.Adam")


def plain_norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the gradient norm of a model on one rank; missing gradients count as 0."""
    return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


class PolicyOptimizer:
    """Optimizer, schedule and loss scale of one model.

    It updates this rank's plain tensors, so any torch optimizer can be used. For half-precision parameters it keeps
    float32 master weights: micro-batches accumulate gradients in float32, and each step copies the updated master
    weights to the parameters.

    Args:
        parameters: parameters of this rank; only those that require gradients are trained.
        local: returns the plain tensor behind a parameter or gradient.
        total_norm: returns the gradient norm of the full model, over all ranks.
        key: section of the settings that `config` comes from, such as `policy`; used in errors.
        weights: the weight in each of `parameters`; by default they are unnamed, so that groups and Muon do not apply.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizationConfig,
        local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        total_norm: Callable[[Sequence[torch.Tensor | None]], torch.Tensor] = plain_norm,
        key: str = "policy",
        weights: Sequence[WeightInfo] | None = None,
    ):
        parameters = list(parameters)
        infos = [WeightInfo("")] * len(parameters) if weights is None else weights
        trained = [(p, info) for p, info in zip(parameters, infos, strict=True) if p.requires_grad]
        self._parameters = [parameter for parameter, _ in trained]
        self._local, self._total_norm = local, total_norm
        self._max_grad_norm = config.max_grad_norm
        self._trained = [local(parameter.detach()) for parameter in self._parameters]
        """Tensors that the optimizer updates: the parameters themselves, or float32 master weights."""
        self.has_masters = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in self._trained)
        if self.has_masters:
            self._trained = [tensor.float() for tensor in self._trained]
            for parameter, master in zip(self._parameters, self._trained, strict=True):
                parameter.register_post_accumulate_grad_hook(_accumulator_into(master))
        # Sharded parameters are float32 and need no masters, but checkpoints round them and save masters separately.
        self._keeps_masters = self.has_masters or config.precision in HALF_PRECISIONS
        self.loss_scale = _FIRST_LOSS_SCALE if config.precision == "float16" else 1.0
        """Multiply losses by this factor before the backward pass; `step` divides the gradients by it."""
        self._is_scaled = self.loss_scale != 1.0
        self._good_steps = 0
        self.has_updated = False
        """Whether an update was made, so that the optimizer has all of its state."""
        infos = [info for _, info in trained]
        groups = () if weights is None else config.optimizer.groups
        self._groups = grouped(infos, groups, f"{key}.optimizer.groups")
        self._optimizer = _make_optimizer(self._trained, infos, self._groups, config, key)
        self._make_scheduler = partial(_make_scheduler, self._optimizer, config, key)
        self._scheduler = self._make_scheduler()
        self._key = key

    @property
    def learning_rate(self) -> float:
        """The learning rate of the weights that belong to no configured group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> float:
        """Clip gradients and update; return the norm before clipping. Skip the update if the norm is not finite."""
        if not self.has_masters:
            for parameter, tensor in zip(self._parameters, self._trained, strict=True):
                tensor.grad = None if parameter.grad is None else self._local(parameter.grad)
        gradients = [tensor.grad for tensor in self._trained]
        for gradient in gradients if self._is_scaled else ():
            if gradient is not None:
                gradient.div_(self.loss_scale)
        norm = self._total_norm(gradients)
        if is_finite := bool(torch.isfinite(norm)):
            if self._max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._trained, self._max_grad_norm, norm)
            self._optimizer.step()
            self.has_updated = True
        self.zero_grad()
        if is_finite and self.has_masters:
            self._write_parameters()
        if self._is_scaled:
            self._adapt_loss_scale(is_finite)
        return norm.item()

    def _adapt_loss_scale(self, is_finite: bool) -> None:
        """Halve the scale after an overflow; double it after many steps without overflow."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self._good_steps % _STEPS_PER_LOSS_SCALE == 0:
            self.loss_scale = min(_LARGEST_LOSS_SCALE, self.loss_scale * 2)

    def zero_grad(self) -> None:
        for tensor in (*self._parameters, *self._trained):
            tensor.grad = None

    def schedule(self) -> None:
        """Advance the learning-rate schedule; call this once per training step."""
        if self._scheduler is not None:
            self._scheduler.step()

    def own_tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's state tensors and master weights."""
        states = self._optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*held, *(self._trained if self.has_masters else ())]

    def state_dict(self) -> dict[str, Any]:
        """Return the state; torch's entries are keyed by the index of the parameter, whatever the groups are."""
        own = self._optimizer.state_dict()
        indices = list(chain.from_iterable(group.indices for group in self._groups))
        saved_groups = [
            {**saved, "params": group.indices, **({} if group.pattern is None else {"pattern": group.pattern})}
            for saved, group in zip(own["param_groups"], self._groups, strict=True)
        ]
        by_parameter = {indices[position]: entry for position, entry in own["state"].items()}
        state: dict[str, Any] = {
            "kind": type(self._optimizer).__name__,
            "optimizer": {"state": dict(sorted(by_parameter.items())), "param_groups": saved_groups},
        }
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        if self._keeps_masters:
            state["masters"] = list(self._trained)
        if self._is_scaled:
            state |= {"loss_scale": self.loss_scale, "good_steps": self._good_steps}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, but keep the current settings: a changed learning rate, group or schedule applies as if it
        had been set from the start of the run."""
        saved = {group.pop("pattern", None): group for group in map(dict, state["optimizer"]["param_groups"])}
        groups = []
        for group in self._groups:
            settings = {**self._optimizer.defaults, **group.settings, "params": group.indices}
            groups.append({**saved.get(group.pattern, saved[None]), **settings})
            groups[-1].pop("initial_lr", None)
        self._optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        if self._scheduler is not None:
            self._scheduler = self._make_scheduler()
            self._advance_schedule(state["scheduler"]["last_epoch"])
        if self._is_scaled:
            self.loss_scale, self._good_steps = state["loss_scale"], state["good_steps"]
        if self._keeps_masters:
            with torch.no_grad():
                for master, saved in zip(self._trained, state["masters"], strict=True):
                    master.copy_(saved)
        if self.has_masters:
            self._write_parameters()

    def reset_to_model(self) -> None:
        """Copy the model's weights into the master weights; call this after changing the weights directly."""
        with torch.no_grad():
            for parameter, tensor in zip(self._parameters, self._trained, strict=True):
                tensor.copy_(self._local(parameter))

    def _advance_schedule(self, count: int) -> None:
        """Advance the schedule by `count` steps. Loading a scheduler's state dict would restore its old arguments."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
                for _ in range(count):
                    self.schedule()
        except ValueError as error:
            raise ConfigError(
                f"{self._key}.scheduler fails before step {count} of the run: {error}; change its arguments"
            ) from error

    @torch.no_grad()
    def _write_parameters(self) -> None:
        for parameter, tensor in zip(self._parameters, self._trained, strict=True):
            self._local(parameter).copy_(tensor)


def _accumulator_into(master: torch.Tensor) -> Any:
    def add(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def _make_optimizer(
    parameters: list[torch.Tensor],
    weights: Sequence[WeightInfo],
    groups: Sequence[ParameterGroup],
    config: OptimizationConfig,
    key: str,
) -> torch.optim.Optimizer:
    name, kwargs = config.optimizer.name, dict(config.optimizer.kwargs)
    if name in FUSED_BY_DEFAULT and not kwargs.keys() & {"foreach", "capturable", "differentiable"}:
        kwargs.setdefault("fused", True)
    params = [{"params": [parameters[index] for index in group.indices], **group.settings} for group in groups]
    if name == MUON:
        matrices = {
            parameter: weight.on_full_matrix
            for parameter, weight in zip(parameters, weights, strict=True)
            if weight.on_full_matrix is not None
        }
        return _make(name, kwargs, f"{key}.optimizer", params, partial(Muon, matrices))
    optimizer: torch.optim.Optimizer = _make(name, kwargs, f"{key}.optimizer", params)
    for setting in chain.from_iterable(group.settings for group in groups):
        if setting not in optimizer.defaults:
            raise ConfigError(
                f"{key}.optimizer.groups sets {setting}, which {name} does not have; remove it, or choose another "
                "optimizer"
            )
    return optimizer


def _make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizationConfig, key: str) -> Any:
    schedulers = [
        _make(
            entry.name,
            entry.kwargs,
            f"{key}.scheduler",
            optimizer,
            partial(_named_schedule, entry.name) if entry.name in SCHEDULES else None,
        )
        for entry in config.scheduler
    ]
    if len(schedulers) <= 1:
        return schedulers[0] if schedulers else None
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, list(config.scheduler_milestones))


def schedule_factor(name: str, step: int, warmup_steps: int, total_steps: int | None, final_fraction: float) -> float:
    """Return the factor of the learning rate after `step` steps.

    The factor rises linearly and reaches 1 after `warmup_steps`. Then `constant` stays at 1; `linear` and `cosine` fall
    and reach `final_fraction` only after `total_steps`, so the last step still learns.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if name == "constant" or total_steps is None:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - progress if name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return final_fraction + (1 - final_fraction) * left


def _named_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int | None = None,
    warmup_steps: int = 0,
    final_fraction: float = 0.0,
) -> torch.optim.lr_scheduler.LambdaLR:
    if total_steps is None and name != "constant":
        raise ValueError(f"{name} needs total_steps, the steps over which the learning rate falls")

    def factor(step: int) -> float:
        return schedule_factor(name, step, warmup_steps, total_steps, final_fraction)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _make(name: str, kwargs: dict[str, Any], key: str, argument: Any, factory: Any = None) -> Any:
    """Create an optimizer or scheduler; raise ConfigError if the import path or its arguments are invalid.

    Args:
        argument: first argument.
        factory: what a name that is not an import path stands for.
    """
    factory = factory or import_object(name, f"{key}.name")
    if not callable(factory):
        raise ConfigError(
            f"{key}.name={name!r} is a {type(factory).__name__}; set the import path of a class, "
            "such as torch.optim.AdamW"
        )
    if factory is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise ConfigError(
            f"{key}.name={name!r} needs a metric at each step, which is not supported; choose another scheduler"
        )
    check_arguments(factory, kwargs, f"{key}.kwargs", num_given=1)
    try:
        return factory(argument, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.kwargs={kwargs!r} are not valid for {name}: {error}") from error
