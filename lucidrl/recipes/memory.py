"""Estimate the memory that a run of a language model needs."""

from __future__ import annotations

from lucidrl.models.generation.pages import key_dtype
from lucidrl.models.loading import DTYPES, ModelFacts
from lucidrl.models.policy.config import MUON
from lucidrl.recipes.configs import ExampleRunConfig, RolloutRunConfig
from lucidrl.recipes.preference_configs import DPORunConfig
from lucidrl.utils.device import default_device

GIB = 2**30


def estimate_memory_gib(
    config: RolloutRunConfig | ExampleRunConfig, facts: ModelFacts, longest: int, num_trained: int | None = None
) -> dict[str, float]:
    """Estimate the memory of the main tensors; activations are a rule of thumb.

    Args:
        num_trained: parameters of the adapters; None without LoRA.
    """
    policy = config.policy
    width = DTYPES[policy.precision].itemsize
    parameters, adapters = facts.num_parameters, num_trained or 0
    trained = parameters if num_trained is None else num_trained
    num_sampled = config.max_turns * policy.generation.max_new_tokens if isinstance(config, RolloutRunConfig) else 0
    tokens = policy.train_micro_batch_size * (longest + num_sampled)
    if config.token_batching is not None:
        tokens = config.token_batching[1].train_mb_tokens
    optimizer, optimizer_bytes = "AdamW", trained * {2: 12, 4: 8, 8: 16}[width]
    if policy.optimizer.name == MUON:  # one moment per matrix instead of two; embedding and head may be one weight
        matrices = adapters or max(0, parameters - 2 * facts.vocabulary * facts.hidden_size)
        optimizer, optimizer_bytes = "Muon", optimizer_bytes - matrices * max(width, 4)
    size_bytes = {
        "weights": (parameters + adapters) * width,
        "gradients": trained * max(width, 4),
        f"optimizer ({optimizer})": optimizer_bytes,
        # About 16 activations of the hidden size per layer, and the logits kept for the backward pass.
        "activations": tokens * (facts.num_layers * 16 * facts.hidden_size * width + 2 * facts.vocabulary),
    }
    if isinstance(config, DPORunConfig) and config.dpo.reference == "swap" and num_trained is None:
        size_bytes["reference weights"] = parameters * width
    if isinstance(config, RolloutRunConfig):
        rows = min(config.rows_per_step, policy.generation.max_concurrent_rows)
        cached = rows * num_sampled + config.collector.prompts_per_step * longest
        cached = min(cached, policy.generation.cache_tokens or cached)
        key_width = key_dtype(DTYPES[policy.precision], default_device()).itemsize
        size_bytes["key-value cache"] = cached * facts.kv_elements_per_token * (key_width + width) // 2
        if config.update.needs_reference and num_trained is None:  # with LoRA it is the frozen model
            size_bytes["reference weights"] = parameters * width
        if policy.generation.placement == "separate":
            # A generator holds the current and the next version; generators on the policy's node share their memory.
            is_far = policy.generation.refit == "collective" or policy.generation.nodes == "other"
            copies = policy.generation.num_workers * policy.generation.ranks_per_replica if is_far else 1
            num_engines = policy.generation.num_workers if policy.generation.engine == "vllm" else 0  # own layout
            sent, kept = parameters, 0
            if num_trained is not None and not policy.merges_for_generation:
                sent, kept = num_trained, policy.generation.num_workers * parameters
            size_bytes["generators"] = ((2 * copies + num_engines) * sent + kept) * width
    return {what: size / GIB for what, size in size_bytes.items()}
