"""Settings of generation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from lucidrl.distributed.config import Seconds
from lucidrl.utils.config import Config

VLLM_ARGUMENTS_SET_HERE = {
    "model": "set policy.model_name",
    "tokenizer": "set policy.tokenizer",
    "skip_tokenizer_init": "the tokenizer is that of the policy; set policy.tokenizer",
    "trust_remote_code": "set policy.trust_remote_code",
    "dtype": "set policy.precision",
    "seed": "set seed",
    "max_num_seqs": "set policy.generation.max_concurrent_rows",
    "logprobs_mode": "log-probabilities are those of the full distribution at policy.generation.temperature",
    "generation_config": "set the sampling parameters below policy.generation, such as policy.generation.top_p",
    "distributed_executor_backend": "the replica starts the ranks of its engine; set tensor_parallel_size",
    "worker_cls": "a refit needs the worker class that vLLM chooses; remove it",
    "worker_extension_cls": "Lucid RL sets it to receive refits; remove it",
    "enable_sleep_mode": "set policy.generation.sleep",
    "pipeline_parallel_size": "set tensor_parallel_size, or policy.generation.num_workers for more replicas",
    "prefill_context_parallel_size": "set tensor_parallel_size, or policy.generation.num_workers for more replicas",
    "data_parallel_size": "set policy.generation.num_workers",
    **dict.fromkeys(
        ("nnodes", "node_rank", "master_addr", "master_port"),
        "the ranks of a replica are on one machine; set policy.generation.num_workers for replicas on more machines",
    ),
    "device_ids": "each replica uses the next tensor_parallel_size GPUs; set CUDA_VISIBLE_DEVICES to leave GPUs out",
}
"""Arguments of vLLM's engine that other settings determine → what to set instead."""

SHORTEST_CONTEXT = 64
"""Fewest tokens that an engine must hold; the probe of a refit has up to 32."""
Nats = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MismatchConfig(Config):
    """Limits on the mean absolute difference between the log-probabilities of the same tokens in generation and policy,
    in nats per token."""

    warn: Nats | None = None
    """Warn above this difference; null = 0.05 in float16, 0.25 in bfloat16, else 0.01."""
    stop: Nats | None = 1.0
    """Stop the run above this difference; null = never. Generators without the policy's weights always stop the run."""

    def warn_above(self, precision: str) -> float:
        """Return `warn`, or its default for this precision of the policy, but at most `stop`."""
        warn = {"float16": 0.05, "bfloat16": 0.25}.get(precision, 0.01) if self.warn is None else self.warn
        return warn if self.stop is None else min(warn, self.stop)


class GenerationConfig(Config):
    """How completions are sampled during training, and where."""

    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens per completion (per turn)."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Divides the logits. Scoring and training use the same value, so that their log-probabilities agree."""
    top_k: NonNegativeInt = 0
    """Sample from the k most likely tokens; 0 = all. Log-probabilities stay those of the full distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the smallest set of most likely tokens with this total probability; 1 = all."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A completion ends when it contains one of these strings."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a completion, in addition to the end tokens of the model."""
    max_concurrent_rows: PositiveInt = 512
    """Completions decoded at a time; a waiting prompt starts when another completion ends. The value changes results by
    rounding only."""
    prefill_tokens: PositiveInt = 4096
    """Prompt tokens computed between two decoding steps of the built-in engine; longer prompts are computed in chunks.
    Limits the memory of activations."""
    cache_tokens: PositiveInt | None = None
    """Tokens whose keys and values the built-in engine keeps at most; prompts wait until those of others are dropped.
    A completion counts with its largest possible length, a prompt once for all its completions, both rounded up to
    whole pages of 64 tokens. null = as many as `max_concurrent_rows` completions need."""
    placement: Literal["policy", "separate"] = "policy"
    """policy: the policy's ranks generate; separate: other processes generate with a copy of the weights, which is
    refitted after every step."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """builtin: the forward pass that is trained; vllm: vLLM, in separate processes."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine (`EngineArgs`), such as `gpu_memory_utilization` or `enable_prefix_caching`. Settings
    above set the arguments that they name. `tensor_parallel_size` is the number of GPUs of a replica; on a machine
    without GPUs, of its processes."""
    sleep: bool = False
    """Free the GPU memory of vLLM while the policy trains: its weights move to host memory, its cache is dropped. The
    next refit brings both back. For replicas on GPUs of the policy; without effect on a CPU."""
    num_workers: PositiveInt = 1
    """Number of replicas; they split the prompts."""
    nodes: Literal["any", "policy", "other"] = "any"
    """Nodes of a Ray cluster on which separate generators may run. policy: nodes with a policy rank; other: nodes
    without a policy rank; any: all nodes, but with `refit=ipc` only nodes with a policy rank."""
    max_restarts: NonNegativeInt = 3
    """Most consecutive restarts of one separate process without a completed chunk in between; a process is restarted
    when it exits or times out. One more failure stops the run."""
    step_timeout_s: Seconds = 120.0
    """Timeout of a decoding step of a separate process in asynchronous training; a process that exceeds it is
    restarted. The step may compute the prompts of all rows that start in it. The first step of a process may take
    cluster.start_timeout_s, because engines compile in it."""
    refit: Literal["auto", "ipc", "collective"] = "auto"
    """How weights reach separate processes: through shared memory on a node (`ipc`), over the network (`collective`),
    or the method that fits each process (`auto`)."""
    refit_bucket_mb: PositiveInt = 256
    """Size of a bucket of weights; two buckets are in flight at a time."""
    verify_refit: bool = False
    """Verify the SHA-256 of every bucket before a generator uses its weights. Without it, checksums of all weights are
    only compared after the refit."""
    in_flight: Literal["keep", "recompute", "finish", "abort"] = "keep"
    """Rows that are being completed when new weights arrive, which happens in asynchronous training only. keep:
    continue with the cached keys and values of the earlier weights; recompute: continue, with keys and values of the
    new weights; finish: refit after these rows are complete; abort: start these rows again."""
    mismatch: MismatchConfig = MismatchConfig()
    """Limits on the mismatch between generation and policy; see docs/mismatch.md."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.placement == "policy" and self.nodes != "any":
            raise ValueError(
                f"nodes={self.nodes} is for separate generators, but placement=policy; set placement=separate, or "
                "leave nodes out"
            )
        if self.refit == "ipc" and self.nodes == "other":
            raise ValueError(
                "refit=ipc needs generators on the policy's nodes, which nodes=other excludes; set refit=auto, or "
                "nodes=policy"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_engine(self) -> Self:
        if self.engine == "builtin":
            if self.vllm:
                raise ValueError(
                    f"vllm.{next(iter(self.vllm))} is for engine=vllm, but engine=builtin; set engine=vllm, or remove "
                    "the argument"
                )
            if self.sleep:
                raise ValueError(
                    "sleep=true is for engine=vllm, but engine=builtin frees its cache by itself; set engine=vllm, or "
                    "remove sleep"
                )
            return self
        if self.placement == "policy":
            raise ValueError(
                "engine=vllm generates in separate processes, but placement=policy; set placement=separate"
            )
        if self.sleep and self.refit == "collective":
            raise ValueError(
                "sleep=true frees GPU memory for the policy, but with refit=collective the replicas use other GPUs; "
                "set refit=auto or refit=ipc, or remove sleep"
            )
        for name, reason in VLLM_ARGUMENTS_SET_HERE.items():
            if name in self.vllm:
                raise ValueError(f"vllm.{name} is not passed on to vLLM: {reason}")
        length = self.vllm.get("max_model_len", SHORTEST_CONTEXT)
        if not isinstance(length, int) or length < SHORTEST_CONTEXT:
            raise ValueError(
                f"vllm.max_model_len={length} is not a whole number of at least {SHORTEST_CONTEXT} tokens; set one, or "
                "remove it to use the model's context"
            )
        if type(size := self.vllm.get("tensor_parallel_size", 1)) is not int or size < 1:
            raise ValueError(
                f"vllm.tensor_parallel_size={size} is not a whole number of at least 1; set the number of GPUs of a "
                "replica, or remove it to use one"
            )
        return self

    @property
    def ranks_per_replica(self) -> int:
        """Processes that one replica computes with, each on a separate GPU if there are GPUs."""
        return int(self.vllm.get("tensor_parallel_size", 1))
