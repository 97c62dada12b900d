"""Warnings about valid settings: runs that cannot learn, and settings without effect."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator
from typing import Any

from lucidrl.algorithms.config import AdvantageEstimator
from lucidrl.algorithms.health import RunWarning
from lucidrl.algorithms.variants import VARIANTS
from lucidrl.recipes.base_config import BaseRunConfig
from lucidrl.recipes.configs import (
    DistillRunConfig,
    ExampleRunConfig,
    GRPORunConfig,
    PPORunConfig,
    RolloutRunConfig,
    SFTRunConfig,
    TextRunConfig,
)
from lucidrl.recipes.preference_configs import DPORunConfig, PreferenceRunConfig, RewardModelRunConfig

CANNOT_LEARN, NO_EFFECT = "cannot_learn", "no_effect"

_ON_POLICY = (
    "with one optimizer step per training step the ratio is always 1; set grpo.num_epochs=2, or "
    "policy.train_global_batch_size below the rows per step"
)


def advice(config: BaseRunConfig) -> list[RunWarning]:
    """Return warnings to show before the run starts.

    A setting without effect is reported only if the user set it, not if its value is a default or comes from a preset.
    """
    learning = [RunWarning(CANNOT_LEARN, message) for message in _cannot_learn(config)]
    return learning + [RunWarning(NO_EFFECT, message) for message in _without_effect(config)]


def _cannot_learn(config: BaseRunConfig) -> Iterator[str]:
    learns_from_teacher = isinstance(config, DistillRunConfig) and config.distill.reward_coefficient == 0
    if isinstance(config, RolloutRunConfig) and not learns_from_teacher:
        estimator, count = config.update.advantages.estimator, config.collector.samples_per_prompt
        key = f"{config.algorithm}.advantages.estimator"
        if count == 1 and estimator is not AdvantageEstimator.PLAIN:
            yield (
                "this run cannot learn from rewards: with collector.samples_per_prompt=1, "
                f"{key}={estimator} compares each sample with itself, and every advantage is 0; "
                f"set collector.samples_per_prompt=8, or {key}=plain"
            )
        elif config.rows_per_step == 1:
            yield (
                "this run cannot learn from rewards: the only sample of a step is compared with itself, and its "
                "advantage is 0; raise collector.prompts_per_step"
            )
        if config.policy.generation.top_k == 1 and count > 1:
            yield (
                "this run cannot learn from rewards: with policy.generation.top_k=1 all samples of a prompt are equal; "
                "set policy.generation.top_k=0"
            )
    roles = ("policy", "critic") if isinstance(config, PPORunConfig) else ("policy",)
    has_known_length = not (isinstance(config, ExampleRunConfig) and config.steps.epochs is not None)
    for role in roles:
        warmup_steps = getattr(config, role).warmup_steps
        if has_known_length and warmup_steps >= config.max_steps:
            yield (
                f"the learning rate never reaches its value: {role}.warmup_steps={warmup_steps} is not less than "
                f"{config.algorithm}.max_steps={config.max_steps}; change one of them"
            )


def _without_effect(config: BaseRunConfig) -> Iterator[str]:
    yield from _beaten_by_a_file(config)
    defaults = type(config)()
    for keys, reason_of in _UNUSED:
        reason = reason_of(config)
        named = [key for key in _expanded(config, keys) if reason and _is_set(config, defaults, key)]
        if named:
            shown = " and ".join(_shown(config, key) for key in named)
            yield f"{shown} {'have' if len(named) > 1 else 'has'} no effect: {reason}"


def _beaten_by_a_file(config: BaseRunConfig) -> Iterator[str]:
    """Settings of the variant that a file replaces, such as the complete settings of another run."""
    variant = config.grpo.variant if isinstance(config, GRPORunConfig) else None
    source = config.origins.of("grpo.variant")
    if variant is None or source is None or source.kind != "command line":
        return
    for name, value in VARIANTS[variant].items():
        key = f"grpo.{name}"
        other = config.origins.of(key)
        if other is not None and other.kind == "file" and value_at(config, key) != value:
            yield (
                f"{key}={value} of grpo.variant={variant} has no effect: {other} sets {value_at(config, key)}; remove "
                "it there, or set it on the command line"
            )


Reason = Callable[[Any], str | None]


def _if(schema: type, condition: Callable[[Any], bool], reason: str) -> Reason:
    return lambda config: reason if isinstance(config, schema) and condition(config) else None


def _if_synchronous(config: Any) -> str | None:
    if not isinstance(config, RolloutRunConfig) or config.update.async_.max_staleness > 0:
        return None
    return f"the run is synchronous; set {config.algorithm}.async.max_staleness=1"


_UNUSED: list[tuple[tuple[str, ...], Reason]] = [
    (
        ("grpo.loss.clip_low", "grpo.loss.clip_high", "grpo.loss.dual_clip"),
        _if(GRPORunConfig, lambda config: config.updates_per_step == 1, _ON_POLICY),
    ),
    (
        ("grpo.loss.kl_estimator",),
        _if(
            GRPORunConfig,
            lambda config: config.grpo.loss.kl_coefficient == 0,
            "grpo.loss.kl_coefficient is 0; raise it for a KL penalty",
        ),
    ),
    (
        ("grpo.loss.constant_length",),
        _if(
            GRPORunConfig,
            lambda config: config.grpo.loss.normalization != "constant",
            "grpo.loss.normalization is not constant; set grpo.loss.normalization=constant",
        ),
    ),
    (
        ("grpo.advantages.kl_level",),
        _if(
            GRPORunConfig,
            lambda config: config.grpo.advantages.kl_coefficient == 0,
            "grpo.advantages.kl_coefficient is 0; raise it for a KL penalty in the reward",
        ),
    ),
    (
        ("grpo.entropy_control.step_size", "grpo.entropy_control.max_coefficient"),
        _if(
            GRPORunConfig,
            lambda config: config.grpo.entropy_control.target is None,
            "grpo.entropy_control.target is null; set the entropy to keep",
        ),
    ),
    (
        ("grpo.loss.importance_cap", "grpo.loss.importance_floor", "grpo.loss.importance_level"),
        _if(
            GRPORunConfig,
            lambda config: config.grpo.loss.importance_correction == "none",
            "grpo.loss.importance_correction is none; set it to truncate or mask",
        ),
    ),
    (
        (
            "collector.max_concurrent_samples",
            "policy.generation.in_flight",
            "policy.generation.step_timeout_s",
            *(f"{algorithm}.async.stale_samples" for algorithm in ("grpo", "distill")),
            *(f"{algorithm}.async.group_fraction" for algorithm in ("grpo", "distill")),
        ),
        _if_synchronous,
    ),
    (
        ("distill.top_k",),
        _if(
            DistillRunConfig,
            lambda config: config.distill.divergence != "top_k",
            "distill.divergence is sampled; set distill.divergence=top_k",
        ),
    ),
    (
        ("distill.advantages.estimator",),
        _if(
            DistillRunConfig,
            lambda config: config.distill.reward_coefficient == 0,
            "distill.reward_coefficient is 0; raise it to learn from rewards too",
        ),
    ),
    (
        ("ppo.clip",),
        _if(
            PPORunConfig,
            lambda config: config.ppo.num_epochs * config.collector.frames_per_batch == config.ppo.minibatch_frames,
            "with one optimizer step per training step the ratio is always 1; raise ppo.num_epochs, or lower "
            "ppo.minibatch_frames",
        ),
    ),
    (
        ("policy.train_micro_batch_size", "policy.logprob_batch_size"),
        _if(
            TextRunConfig,
            lambda config: config.token_batching is not None,
            "token budgets fill the micro-batches; set policy.sequence_packing.enabled=false, or change its "
            "train_mb_tokens and logprob_mb_tokens instead",
        ),
    ),
    *(
        (
            (f"policy.{name}.*",),
            _if(
                TextRunConfig,
                lambda config, name=name: not getattr(config.policy, name).enabled,  # type: ignore[misc]
                f"policy.{name}.enabled is false",
            ),
        )
        for name in ("dynamic_batching", "sequence_packing")
    ),
    (
        tuple(f"policy.generation.{name}" for name in ("num_workers", "refit", "refit_bucket_mb", "verify_refit")),
        _if(
            TextRunConfig,
            lambda config: config.policy.generation.placement == "policy",
            "the policy itself generates; set policy.generation.placement=separate",
        ),
    ),
    *(
        (
            (f"tracking.{name}.*",),
            _if(
                BaseRunConfig,
                lambda config, name=name: not getattr(config.tracking, name).enabled,  # type: ignore[misc]
                f"tracking.{name}.enabled is false",
            ),
        )
        for name in ("wandb", "mlflow", "trackio")
    ),
    (
        ("tracking.monitor_interval_s",),
        _if(BaseRunConfig, lambda config: not config.tracking.monitor, "tracking.monitor is false"),
    ),
    (
        ("validation.every", "validation.prompts_per_batch"),
        _if(TextRunConfig, lambda config: config.validation.num_prompts == 0, "validation.num_prompts is 0"),
    ),
    (
        ("validation.every", "validation.max_episode_frames"),
        _if(PPORunConfig, lambda config: config.validation.num_episodes == 0, "validation.num_episodes is 0"),
    ),
    (
        ("data.validation_fraction",),
        _if(
            TextRunConfig,
            lambda config: config.data.validation_file is not None or "validation_dataset" in config.python_inputs,
            "the validation rows are separate; remove it",
        ),
    ),
    (
        ("env.*",),
        _if(
            ExampleRunConfig,
            lambda config: config.has_rows,
            "the run learns the examples in its rows and uses no environment; remove it",
        ),
    ),
    (
        ("env.max_restarts",),
        _if(
            RolloutRunConfig,
            lambda config: not config.env.is_isolated or "rewards" in config.python_inputs,
            "the environment runs in the driver, where it cannot be restarted",
        ),
    ),
    (
        ("sft.max_steps",),
        _if(SFTRunConfig, lambda config: config.sft.epochs is not None, "sft.epochs sets the length; remove one"),
    ),
    (
        ("dpo.max_steps",),
        _if(DPORunConfig, lambda config: config.dpo.epochs is not None, "dpo.epochs sets the length; remove one"),
    ),
    (
        ("reward_model.max_steps",),
        _if(
            RewardModelRunConfig,
            lambda config: config.reward_model.epochs is not None,
            "reward_model.epochs sets the length; remove one",
        ),
    ),
    (
        ("dpo.desirable_weight", "dpo.undesirable_weight"),
        _if(DPORunConfig, lambda config: config.dpo.loss != "kto", "dpo.loss is not kto; set dpo.loss=kto"),
    ),
    (
        ("validation.samples_per_prompt", "validation.solved_at", "validation.prompts_per_batch"),
        _if(PreferenceRunConfig, lambda config: True, "the run compares written completions and samples none"),
    ),
]
"""(Keys, function that returns the reason why these keys have no effect, or None if they have an effect); `section.*`
means all keys of the section except `enabled`."""


def _expanded(config: BaseRunConfig, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        if key.endswith(".*"):
            section = key.removesuffix("*")
            yield from (name for name in config.origins if name.startswith(section) and name != f"{section}enabled")
        else:
            yield key


def _is_set(config: BaseRunConfig, defaults: BaseRunConfig, key: str) -> bool:
    """Whether the user set the key. A key of a file counts only if its value is not the default, because the file may
    be the complete settings of another run."""
    source = config.origins.of(key)
    if source is None or source.kind in ("preset", "run", "variant"):
        return False
    return source.kind == "command line" or value_at(config, key) != value_at(defaults, key)


def _shown(config: BaseRunConfig, key: str) -> str:
    source = config.origins.of(key)
    alias = f" (as {source.alias})" if source is not None and source.alias else ""
    return f"{key}={value_at(config, key)}{alias}"


def value_at(config: Any, key: str) -> Any:
    """Return the value of a dotted key."""
    for part in key.split("."):
        name = f"{part}_" if keyword.iskeyword(part) else part
        config = config.get(part) if isinstance(config, dict) else getattr(config, name, None)
    return config
