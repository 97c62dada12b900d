"""A whole GRPO step compared with TRL's GRPOTrainer: same model, prompts, rewards, learning rate and reference.

Two models: a Llama of 0.8 million parameters with random weights in float32, with 8 prompts x 8 completions; and
SmolLM2-135M-Instruct in bfloat16, with 4 prompts x 8 completions. A step samples the completions at temperature 1,
rewards them, computes reference log-probabilities (beta 0.04), and makes one AdamW step on all rows. The
end-of-sequence id is outside the model's vocabulary, so every completion has 32 tokens on both sides; the benchmark
checks the counts. TRL pads rows and runs without gradient checkpointing, which would slow it down. With bfloat16, TRL
trains bfloat16 weights, while Lucid RL also updates float32 master weights. Lucid RL computes the tokens of a prompt
once for its 8 completions.

TRL's trainer owns its loop, so the steps of Lucid RL run in its callback, in turn with TRL's steps. The time of a TRL
step is from `on_step_begin` to `on_step_end`, without its data loader and its logging. The time of a Lucid RL step
covers collect, prepare, train and the weight update.

Measured on two cores: SmolLM2 3.72 times TRL's speed (3.80 s, of them 1.42 s generation, and 14.2 s); the small model
1.05 times (0.250 s and 0.264 s), which misses the target of 1.3. Its training and reference take as long as in bare
PyTorch, 0.13 s, so the target leaves 0.07 s for 64 completions of 32 tokens. They take 0.11 s, of which matrix products
of the weights take 0.04 s and the other modules of transformers' forward as much. Two approaches: fewer operations per
decoding step (only the columns in use, an index that is kept from step to step, one pass for softmax and normalizer)
made generation a tenth faster; `torch.compile` of the decoder layers, with the attention outside of it, made it slower
(small model 0.190 s instead of 0.165 s, SmolLM2 2.26 s instead of 2.19 s, one thread, dynamic shapes; the first call
took 15 to 37 s), so there is no setting for it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from harness import Claim, Times, arguments, print_table, report, take_turns
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig as TRLConfig
from trl import GRPOTrainer

from lucidrl.algorithms.config import GRPOConfig, ValidationConfig
from lucidrl.algorithms.grpo import GRPO
from lucidrl.algorithms.loop import TrainingLoop
from lucidrl.algorithms.saver import Saver
from lucidrl.checkpoint.config import CheckpointConfig
from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.interfaces import EnvReply, EnvRequest
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.losses.config import ClippedPGConfig
from lucidrl.losses.policy_gradient import ClippedPGLoss
from lucidrl.models.embedded import embedded_model, embedded_tokenizer
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig, Precision
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import recorder
from lucidrl.utils.allocator import keep_freed_memory
from lucidrl.utils.logger import Logger

SAMPLES, NEW_TOKENS = 8, 32
BETA, LEARNING_RATE = 0.04, 1e-5
WARMUPS = 3
PHASES = ("generate", "reference", "train")


@dataclass(frozen=True)
class Case:
    """A model, and the size of a step."""

    label: str
    source: str | None
    """Folder of the model; None is the embedded architecture with random weights."""
    precision: Precision
    num_prompts: int
    num_steps: int
    target: float

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)


def digit_share(text: str) -> float:
    """The reward: the share of digits, which is above zero for random text."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


class DigitEnv:
    """Rewards completions with their share of digits."""

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [EnvReply(reward=digit_share(request.completion)) for request in batch]


class LucidSide:
    """The components of a GRPO run of Lucid RL, and the time of each step."""

    def __init__(self, case: Case, folder: Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        config = PolicyConfig(
            model_name=str(folder),
            precision=case.precision,
            optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
            generation=GenerationConfig(max_new_tokens=NEW_TOKENS),
        )
        policy = Policy(config, tokenizer)
        collector = TextCollector(
            policy,
            EnvRunner(DigitEnv(), timeout_s=60, max_concurrency=8, on_error="fail"),
            tokenizer,
            prompts,
            TextCollectorConfig(prompts_per_step=case.num_prompts, samples_per_prompt=SAMPLES),
            context_length=512,
        )
        self.grpo = GRPO(
            config=GRPOConfig(loss=ClippedPGConfig(kl_coefficient=BETA)),
            loop=TrainingLoop(
                max_steps=1,
                policy=policy,
                saver=Saver(CheckpointManager(folder / "checkpoints"), CheckpointConfig(), policy, lambda line: None),
                logger=Logger({"log_dir": str(folder), "tensorboard_enabled": False}),
                watcher=NoDisplay(),
                validation=ValidationConfig(num_prompts=0),
            ),
            policy=policy,
            collector=collector,
            pad_id=int(tokenizer.pad_token_id),  # type: ignore[arg-type]
        )
        self._loss_fn = ClippedPGLoss(self.grpo.config.loss, on_policy=True)
        self.seconds: list[float] = []
        self.phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.sampled_tokens = 0

    def step(self) -> None:
        recorder.drain()
        start = time.perf_counter()
        rollouts = self.grpo.collector.collect()
        self.last_batch = self.grpo.prepare(rollouts)
        self.grpo.policy.train(self.last_batch, self._loss_fn)
        self.grpo.collector.update_policy_weights_(version=len(self.seconds) + 1)
        self.seconds.append(time.perf_counter() - start)
        totals = recorder.drain()
        for phase in PHASES:
            self.phases[phase].append(totals[phase].seconds)
        self.sampled_tokens += int(rollouts.metrics["sampled_tokens"])

    def close(self) -> None:
        self.grpo.collector.shutdown()
        self.grpo.loop.logger.finish()


class NoDisplay:
    """A watcher without output."""

    def on_validation(self, step: int, metrics: Any) -> None: ...

    def on_samples(self, step: int, message_logs: Any, rewards: Any) -> None: ...

    def on_step(self, step: int, metrics: Any) -> None: ...

    def announce(self, message: str) -> None: ...


class TakeTurns(TrainerCallback):
    """Times TRL's steps, and runs a Lucid RL step after each."""

    def __init__(self, lucid: LucidSide):
        self._lucid = lucid
        self._start = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self._lucid.step()


class TRLReward:
    """The same reward, as a TRL reward function; counts the sampled tokens."""

    __name__ = "digit_share"

    def __init__(self) -> None:
        self.sampled_tokens = 0

    def __call__(self, completions: Any, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.sampled_tokens += sum(map(len, completion_ids))
        return [digit_share(completion[0]["content"]) for completion in completions]


def trl_trainer(
    case: Case,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    reward: TRLReward,
    turns: TakeTurns,
) -> GRPOTrainer:
    config = TRLConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.num_prompts * SAMPLES,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        beta=BETA,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_steps=WARMUPS + case.num_steps,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": list(prompt.messages)} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[turns],
    )


def bare_phases(case: Case, folder: Path, batch: Any) -> Times:
    """The reference and training phases in bare PyTorch, on the same padded tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    ids, mask = batch["input_ids"], batch["token_mask"][:, 1:]

    def logprobs() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]

    def train() -> None:
        (-(logprobs() * mask).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return take_turns({"reference": torch.no_grad()(logprobs), "train": train}, rounds=3)


def save_model(case: Case, folder: Path) -> PreTrainedTokenizerBase:
    """Save the model with a tokenizer whose end token has no logit."""
    if case.source is None:
        model, tokenizer = embedded_model(warm=False, seed=0, attn_implementation="sdpa"), embedded_tokenizer()
    else:
        model = AutoModelForCausalLM.from_pretrained(case.source, dtype=case.dtype)
        tokenizer = load_tokenizer(case.source)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    assert int(tokenizer.eos_token_id) >= model.config.vocab_size  # type: ignore[arg-type]
    model.config.eos_token_id = tokenizer.eos_token_id
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def measure(case: Case) -> Claim:
    prompts = [
        Prompt(f"{n}+{n + 7}", ({"role": "user", "content": f"{n}+{n + 7}="},))
        for n in range(10, 10 + 8 * case.num_prompts)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = save_model(case, folder)
        lucid = LucidSide(case, folder, tokenizer, prompts)
        turns, reward = TakeTurns(lucid), TRLReward()
        trl_trainer(case, folder, tokenizer, prompts, reward, turns).train()
        lucid.close()
        bare = bare_phases(case, folder, lucid.last_batch)

    expected = (WARMUPS + case.num_steps) * case.num_prompts * SAMPLES * NEW_TOKENS
    print(f"sampled tokens: Lucid RL {lucid.sampled_tokens}, TRL {reward.sampled_tokens}, expected {expected}")
    assert lucid.sampled_tokens == reward.sampled_tokens == expected
    times = Times({"lucidrl": lucid.seconds[WARMUPS:], "trl": turns.seconds[WARMUPS:]})
    rows = [(f"{case.label}, whole step", f"{times.median('lucidrl'):.3f} s", f"TRL: {times.median('trl'):.3f} s")]
    for phase in PHASES:
        compared = f"bare PyTorch: {bare.median(phase):.3f} s" if phase in bare.seconds else ""
        rows.append((phase, f"{median(lucid.phases[phase][WARMUPS:]):.3f} s", compared))
    print_table(rows, header=("phase", "Lucid RL", "compared with"))
    return Claim(f"GRPO step vs TRL, {case.label}", case.target, times.speedup("lucidrl", "trl"))


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"))
    torch.set_num_threads(options.threads)
    keep_freed_memory()  # as in runs
    cases = [
        Case("0.8 million parameters, float32", None, "float32", num_prompts=8, num_steps=15, target=1.3),
        Case("SmolLM2, bfloat16", options.model, "bfloat16", num_prompts=4, num_steps=5, target=3.3),
    ]
    report([measure(case) for case in cases], options.json)


if __name__ == "__main__":
    main()
