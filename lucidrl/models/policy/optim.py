"""The optimizer of a policy: float32 master weights where the model computes in less, clipping, schedule, skipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lucidrl.errors import ConfigError
from lucidrl.models.policy.config import PolicyConfig
from lucidrl.utils.imports import import_object

FUSED_BY_DEFAULT = ("torch.optim.AdamW", "torch.optim.Adam")


class PolicyOptimizer:
    """Owns what turns gradients into new weights.

    With half-precision parameters the optimizer works on float32 copies: each micro-batch's gradient is added to the
    copy's float32 gradient as soon as it is complete, and the parameters are rounded from the copies after the step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: PolicyConfig):
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._max_grad_norm = config.max_grad_norm
        self._masters = self._parameters
        if any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in self._parameters):
            self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.register_post_accumulate_grad_hook(_adder_to(master))
        self._optimizer = _make_optimizer(self._masters, config)
        self._scheduler = _make_scheduler(self._optimizer, config)

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def has_masters(self) -> bool:
        return self._masters is not self._parameters

    def step(self) -> float:
        """Clip and step, unless a gradient is NaN or infinite; returns the norm before clipping, which then tells."""
        gradients = [master.grad for master in self._masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if is_finite := bool(torch.isfinite(norm)):
            if self._max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self._masters, self._max_grad_norm, norm)
            self._optimizer.step()
        self.zero_grad()
        if is_finite and self.has_masters:
            self._publish()
        return norm.item()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def schedule(self) -> None:
        """Advance the learning-rate schedule by one call of `train`."""
        if self._scheduler is not None:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": self._optimizer.state_dict()}
        if self._scheduler is not None:
            state["scheduler"] = self._scheduler.state_dict()
        if self.has_masters:
            state["masters"] = [master.detach() for master in self._masters]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with the settings that are configured now: a changed learning rate is the new
        peak of the schedule."""
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        for group in self._optimizer.param_groups:
            configured = dict(self._optimizer.defaults)
            factor = configured.pop("lr") / group.get("initial_lr", group["lr"])
            group.update(configured)
            for rate in ("lr", "initial_lr") if factor != 1 else ():
                if rate in group:
                    group[rate] *= factor
            for scheduler in self._schedulers() if factor != 1 else ():
                scheduler.base_lrs = [group["initial_lr"]]
        if self.has_masters:
            with torch.no_grad():
                for master, saved in zip(self._masters, state["masters"], strict=True):
                    master.copy_(saved)
            self._publish()

    def take_weights(self) -> None:
        """Start over from the model's current weights (after they were loaded from elsewhere)."""
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                master.copy_(parameter)

    def _schedulers(self) -> list[Any]:
        if self._scheduler is None:
            return []
        return getattr(self._scheduler, "_schedulers", [self._scheduler])

    @torch.no_grad()
    def _publish(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)


def _adder_to(master: nn.Parameter) -> Any:
    def add(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)
        parameter.grad = None

    return add


def _make_optimizer(parameters: list[nn.Parameter], config: PolicyConfig) -> torch.optim.Optimizer:
    factory = import_object(config.optimizer.name, "policy.optimizer.name")
    kwargs = dict(config.optimizer.kwargs)
    if config.optimizer.name in FUSED_BY_DEFAULT and not kwargs.keys() & {"foreach", "capturable", "differentiable"}:
        kwargs.setdefault("fused", True)
    try:
        return factory(parameters, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"policy.optimizer.kwargs={kwargs!r} does not suit {config.optimizer.name}: {error}"
        ) from error


def _make_scheduler(optimizer: torch.optim.Optimizer, config: PolicyConfig) -> Any:
    schedulers = []
    for entry in config.scheduler:
        factory = import_object(entry.name, "policy.scheduler.name")
        if factory is torch.optim.lr_scheduler.ReduceLROnPlateau:
            raise ConfigError(
                f"policy.scheduler.name={entry.name!r} needs a metric at each step; choose one that does not"
            )
        try:
            schedulers.append(factory(optimizer, **entry.kwargs))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"policy.scheduler.kwargs={entry.kwargs!r} does not suit {entry.name}: {error}"
            ) from error
    if len(schedulers) <= 1:
        return schedulers[0] if schedulers else None
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, list(config.scheduler_milestones))
