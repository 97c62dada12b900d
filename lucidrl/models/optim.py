"""The optimizer of a policy: float32 master weights where the model computes in less, clipping, schedule, skipping."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import HALF_PRECISIONS, OptimizationConfig
from lucidrl.utils.imports import import_object
from lucidrl.utils.suggestions import check_arguments

_FIRST_LOSS_SCALE, _LARGEST_LOSS_SCALE, _STEPS_PER_LOSS_SCALE = 2.0**12, 2.0**16, 200
FUSED_BY_DEFAULT = ("torch.optim.AdamW", "torch.optim.Adam")


def plain_norm(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Norm of the gradients of a model that one rank holds; those of parameters without one count as 0."""
    return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


class PolicyOptimizer:
    """Owns what turns gradients into new weights.

    It works on the plain tensors of this rank, so that every torch optimizer can be used. With half-precision
    parameters these are float32 copies: each micro-batch's gradient is added to the copy's float32 gradient as soon as
    it is complete, and the parameters are rounded from the copies after the step.

    Args:
        parameters: those to train, as this rank holds them.
        local: the plain tensor behind a parameter or its gradient.
        total_norm: of the gradient of the whole model, over all ranks.
        key: of the config, for complaints about it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimizationConfig,
        local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        total_norm: Callable[[Sequence[torch.Tensor | None]], torch.Tensor] = plain_norm,
        key: str = "policy",
    ):
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._local, self._total_norm = local, total_norm
        self._max_grad_norm = config.max_grad_norm
        self._trained = [local(parameter.detach()) for parameter in self._parameters]
        """What the optimizer changes: the parameters' own memory, or float32 copies of it."""
        self.has_masters = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in self._trained)
        if self.has_masters:
            self._trained = [tensor.float() for tensor in self._trained]
            for parameter, master in zip(self._parameters, self._trained, strict=True):
                parameter.register_post_accumulate_grad_hook(_adder_to(master))
        # Sharded parameters are float32 themselves, but what is saved of them is rounded.
        self._keeps_masters = self.has_masters or config.precision in HALF_PRECISIONS
        self.loss_scale = _FIRST_LOSS_SCALE if config.precision == "float16" else 1.0
        """What losses are multiplied with before the backward pass; gradients are divided by it again."""
        self._is_scaled = self.loss_scale != 1.0
        self._good_steps = 0
        self._optimizer = _make_optimizer(self._trained, config, key)
        self._make_scheduler = partial(_make_scheduler, self._optimizer, config, key)
        self._scheduler = self._make_scheduler()
        self._key = key

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def step(self) -> float:
        """Clip and step, unless a gradient is NaN or infinite; returns the norm before clipping, which then tells."""
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
        self.zero_grad()
        if is_finite and self.has_masters:
            self._publish()
        if self._is_scaled:
            self._adapt_loss_scale(is_finite)
        return norm.item()

    def _adapt_loss_scale(self, is_finite: bool) -> None:
        """Small gradients vanish in float16 unless they are scaled up, large ones overflow if they are."""
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.loss_scale = max(1.0, self.loss_scale / 2)
        elif self._good_steps % _STEPS_PER_LOSS_SCALE == 0:
            self.loss_scale = min(_LARGEST_LOSS_SCALE, self.loss_scale * 2)

    def zero_grad(self) -> None:
        for tensor in (*self._parameters, *self._trained):
            tensor.grad = None

    def schedule(self) -> None:
        """Advance the learning-rate schedule by one call of `train`."""
        if self._scheduler is not None:
            self._scheduler.step()

    def own_tensors(self) -> list[torch.Tensor]:
        """What the optimizer holds beside the model's parameters: its state, and the float32 copies if there are."""
        states = self._optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*held, *(self._trained if self.has_masters else ())]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kind": type(self._optimizer).__name__, "optimizer": self._optimizer.state_dict()}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        if self._keeps_masters:
            state["masters"] = list(self._trained)
        if self._is_scaled:
            state |= {"loss_scale": self.loss_scale, "good_steps": self._good_steps}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with the settings that are configured now: learning rate and schedule, where they
        are not as before, are what they would be by now had they been so from the start."""
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:
            group.pop("initial_lr", None)
            group.update(self._optimizer.defaults)
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
            self._publish()

    def take_weights(self) -> None:
        """Start over from the model's current weights (after they were loaded from elsewhere)."""
        with torch.no_grad():
            for parameter, tensor in zip(self._parameters, self._trained, strict=True):
                tensor.copy_(self._local(parameter))

    def _advance_schedule(self, count: int) -> None:
        """What a scheduler keeps is mixed with its arguments, so it is not loaded: it takes its steps again."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
                for _ in range(count):
                    self.schedule()
        except ValueError as error:
            raise ConfigError(f"{self._key}.scheduler does not reach step {count}, the run's: {error}") from error

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, tensor in zip(self._parameters, self._trained, strict=True):
            self._local(parameter).copy_(tensor)


def _adder_to(master: torch.Tensor) -> Any:
    def add(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def _make_optimizer(parameters: list[torch.Tensor], config: OptimizationConfig, key: str) -> torch.optim.Optimizer:
    name, kwargs = config.optimizer.name, dict(config.optimizer.kwargs)
    if name in FUSED_BY_DEFAULT and not kwargs.keys() & {"foreach", "capturable", "differentiable"}:
        kwargs.setdefault("fused", True)
    return _make(name, kwargs, f"{key}.optimizer", parameters)


def _make_scheduler(optimizer: torch.optim.Optimizer, config: OptimizationConfig, key: str) -> Any:
    schedulers = [_make(entry.name, entry.kwargs, f"{key}.scheduler", optimizer) for entry in config.scheduler]
    if len(schedulers) <= 1:
        return schedulers[0] if schedulers else None
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, list(config.scheduler_milestones))


def _make(name: str, kwargs: dict[str, Any], key: str, argument: object) -> Any:
    """Call the class that a setting names.

    Raises:
        ConfigError: if there is none, or if it does not take the arguments.
    """
    factory = import_object(name, f"{key}.name")
    if not callable(factory):
        raise ConfigError(
            f"{key}.name={name!r} is a {type(factory).__name__}; give the import path of a class, "
            "such as torch.optim.AdamW"
        )
    if factory is torch.optim.lr_scheduler.ReduceLROnPlateau:
        raise ConfigError(f"{key}.name={name!r} needs a metric at each step; choose one that does not")
    check_arguments(factory, kwargs, f"{key}.kwargs", num_given=1)
    try:
        return factory(argument, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.kwargs={kwargs!r} does not suit {name}: {error}") from error
