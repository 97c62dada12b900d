"""Names from other libraries: aliases of settings, and names that are refused with a list of candidates."""

from __future__ import annotations

from lucidrl.utils.suggestions import OtherNames

_RATE = ("policy.optimizer.kwargs.lr", "critic.optimizer.kwargs.lr")
_TOKENS = ("policy.generation.max_new_tokens",)
_STEPS = (
    *("grpo.max_steps", "distill.max_steps", "sft.max_steps", "dpo.max_steps", "reward_model.max_steps"),
    "ppo.max_steps",
)
_EPOCHS_OF_EXAMPLES = ("sft.epochs", "dpo.epochs", "reward_model.epochs")

ALIASES: dict[str, tuple[str, ...]] = {
    "lr": _RATE,
    "learning_rate": _RATE,
    "weight_decay": ("policy.optimizer.kwargs.weight_decay", "critic.optimizer.kwargs.weight_decay"),
    "scheduler": ("policy.scheduler", "critic.scheduler"),
    "lr_scheduler_type": ("policy.scheduler", "critic.scheduler"),
    "warmup_steps": ("policy.warmup_steps", "critic.warmup_steps"),
    "max_grad_norm": ("policy.max_grad_norm", "critic.max_grad_norm"),
    "model": ("policy.model_name",),
    "model_name": ("policy.model_name",),
    "dataset": ("data.file",),
    "max_steps": _STEPS,
    "epochs": _EPOCHS_OF_EXAMPLES,
    "num_train_epochs": _EPOCHS_OF_EXAMPLES,
    "num_iterations": ("grpo.num_epochs", "distill.num_epochs"),
    "beta": ("grpo.loss.kl_coefficient", "dpo.beta"),
    "loss_type": ("dpo.loss",),
    "desirable_weight": ("dpo.desirable_weight",),
    "undesirable_weight": ("dpo.undesirable_weight",),
    "kl_coefficient": ("grpo.loss.kl_coefficient",),
    "epsilon": ("grpo.loss.clip_low", "grpo.loss.clip_high", "ppo.clip"),
    "epsilon_high": ("grpo.loss.clip_high",),
    "temperature": ("policy.generation.temperature",),
    "top_p": ("policy.generation.top_p",),
    "top_k": ("policy.generation.top_k",),
    "max_tokens": _TOKENS,
    "max_new_tokens": _TOKENS,
    "max_completion_length": _TOKENS,
    "num_generations": ("collector.samples_per_prompt",),
    "group_size": ("collector.samples_per_prompt",),
    "gamma": ("ppo.discount",),
    "save_steps": ("checkpoint.every",),
    "eval_steps": ("validation.every",),
}
"""Alias → the settings that it sets; settings that the run does not have are left out. `lr` sets the learning rate of
the policy and, in a control run, of the critic. An alias is written without a section."""

_BATCH = {
    "collector.prompts_per_step": "prompts per step",
    "sft.examples_per_step": "examples per step",
    "dpo.examples_per_step": "preferences per step",
    "reward_model.examples_per_step": "pairs per step",
    "collector.frames_per_batch": "frames per step",
    "policy.train_global_batch_size": "rows per optimizer step",
    "ppo.minibatch_frames": "frames per optimizer step",
    "policy.train_micro_batch_size": "rows per micro-batch; it changes only memory and speed",
}
_FOLDER = {"run.root": "parent folder of all runs", "run.name": "folder of this run below run.root"}
_EPOCHS = {
    "grpo.num_epochs": "optimizer epochs per batch",
    "distill.num_epochs": "optimizer epochs per batch",
    "ppo.num_epochs": "optimizer epochs over the frames of a training step",
    **dict.fromkeys(_STEPS, "training steps of the run"),
}

CANDIDATES: dict[str, dict[str, str]] = {
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "mini_batch_size": _BATCH,
    "n": {"collector.samples_per_prompt": "completions per prompt"},
    "epochs": _EPOCHS,
    "num_epochs": _EPOCHS | dict.fromkeys(_EPOCHS_OF_EXAMPLES, "passes over the examples"),
    "num_train_epochs": _EPOCHS,
    "total_timesteps": {"ppo.max_steps": "training steps of the run, each with collector.frames_per_batch frames"},
    "n_steps": {"collector.frames_per_batch": "frames per step, over all environments"},
    "output_dir": _FOLDER,
    "logging_steps": {"tracking.dump_samples_every": "steps between two dumps of samples; metrics are always written"},
    "report_to": {f"tracking.{name}.enabled": f"log to {name}" for name in ("wandb", "mlflow", "trackio")},
    "bf16": {"policy.precision": "float32, bfloat16, float16 or float64"},
    "fp16": {"policy.precision": "float32, bfloat16, float16 or float64"},
    "dtype": {"policy.precision": "float32, bfloat16, float16 or float64"},
    "max_prompt_length": {"data.max_prompt_tokens": "drop longer prompts"},
    "num_gpus": {"cluster.num_workers": "ranks of the policy"},
}
"""Names that are not aliases, because their meaning or their values differ: name → {setting: meaning}."""

OTHER_NAMES = OtherNames(ALIASES, CANDIDATES)
