"""A whole GRPO step compared with TRL's GRPOTrainer: same model, prompts, rewards, learning rate and reference.

The model is a Llama of 0.8 million parameters with random weights, in float32. A step samples 8 prompts x 8 completions
at temperature 1, rewards them, computes reference log-probabilities (beta 0.04), and makes one AdamW step on all 64
rows. The end-of-sequence id is outside the model's vocabulary, so every completion has 32 tokens on both sides; the
benchmark checks the counts. TRL pads rows and runs without gradient checkpointing, which would slow it down. Lucid RL
packs rows, which saves little here: prompts differ by few tokens.

TRL's trainer owns its loop, so the steps of Lucid RL run in its callback, in turn with TRL's steps. The time of a TRL
step is from `on_step_begin` to `on_step_end`, without its data loader and its logging. The time of a Lucid RL step
covers collect, prepare, train and the weight update.

Known limit: 1.06 measured on two quiet cores. A model of this size leaves little to gain. Scoring and training are six
tenths of the step and take as long as bare PyTorch takes for the same tokens, on both sides. In generation, matrix
products take a third of the time; calls of small operations inside the transformers model, which both sides run, take
two thirds. Generation took 0.107 s of 0.277 s; a ratio of 1.3 would need 0.06 s. Two approaches: contiguous cache
buffers (a fifth less CPU time) and inference mode (a tenth less time). With larger models or longer prompts, sharing
each prompt's cache among its samples matters most: see group_sampling.py.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
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
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.profiling.spans import recorder
from lucidrl.utils.logger import Logger

PROMPTS, SAMPLES, NEW_TOKENS = 8, 8, 32
BETA, LEARNING_RATE = 0.04, 1e-5
WARMUPS, STEPS = 3, 15
PHASES = ("generate", "reference", "train")


def digit_share(text: str) -> float:
    """The reward: the share of digits, which is above zero for random text."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


class DigitEnv:
    """Rewards completions with their share of digits."""

    async def step(self, batch: Sequence[EnvRequest]) -> list[EnvReply]:
        return [EnvReply(reward=digit_share(request.completion)) for request in batch]


class LucidSide:
    """The components of a GRPO run of Lucid RL, and the time of each step."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]):
        config = PolicyConfig(
            model_name=str(folder),
            optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
            generation=GenerationConfig(max_new_tokens=NEW_TOKENS),
        )
        policy = Policy(config, tokenizer)
        collector = TextCollector(
            policy,
            EnvRunner(DigitEnv(), timeout_s=60, max_concurrency=8, on_error="fail"),
            tokenizer,
            prompts,
            TextCollectorConfig(prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES),
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
            on_policy=True,
            dump_samples_every=0,
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
    folder: Path, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], reward: TRLReward, turns: TakeTurns
) -> GRPOTrainer:
    config = TRLConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        beta=BETA,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_steps=WARMUPS + STEPS,
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
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": list(prompt.messages)} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[turns],
    )


def bare_phases(folder: Path, batch: Any) -> Times:
    """The reference and training phases in bare PyTorch, on the same padded tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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

    return take_turns({"reference": torch.no_grad()(logprobs), "train": train}, warmups=2)


def save_model(folder: Path) -> PreTrainedTokenizerBase:
    """Save the embedded architecture with random weights, and a tokenizer whose end token has no logit."""
    model = embedded_model(warm=False, seed=0, attn_implementation="sdpa")
    tokenizer = embedded_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    assert int(tokenizer.eos_token_id) >= model.config.vocab_size  # type: ignore[arg-type]
    model.config.eos_token_id = tokenizer.eos_token_id
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(options.threads)
    prompts = [
        Prompt(f"{n}+{n + 7}", ({"role": "user", "content": f"{n}+{n + 7}="},)) for n in range(10, 10 + 8 * PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = save_model(folder)
        lucid = LucidSide(folder, tokenizer, prompts)
        turns, reward = TakeTurns(lucid), TRLReward()
        trl_trainer(folder, tokenizer, prompts, reward, turns).train()
        lucid.close()
        bare = bare_phases(folder, lucid.last_batch)

    expected = (WARMUPS + STEPS) * PROMPTS * SAMPLES * NEW_TOKENS
    print(f"sampled tokens: Lucid RL {lucid.sampled_tokens}, TRL {reward.sampled_tokens}, expected {expected}")
    assert lucid.sampled_tokens == reward.sampled_tokens == expected
    times = Times({"lucidrl": lucid.seconds[WARMUPS:], "trl": turns.seconds[WARMUPS:]})
    rows = [("whole step", f"{times.median('lucidrl'):.3f} s", f"TRL: {times.median('trl'):.3f} s")]
    for phase in PHASES:
        compared = f"bare PyTorch: {bare.median(phase):.3f} s" if phase in bare.seconds else ""
        rows.append((phase, f"{median(lucid.phases[phase][WARMUPS:]):.3f} s", compared))
    print_table(rows, header=("phase", "Lucid RL", "compared with"))
    report([Claim("GRPO step vs TRL", 1.3, times.speedup("lucidrl", "trl"))], options.json)


if __name__ == "__main__":
    main()
