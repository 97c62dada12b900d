"""A DPO step compared with TRL's DPOTrainer: same model, pairs, learning rate, and reference model.

Two models: a Llama of 0.8 million parameters with random weights in float32, with 16 pairs; and SmolLM2-135M-Instruct
in bfloat16, with 2 pairs. Prompt and completion have equally many tokens. A step scores the pairs with the reference
model, which both sides hold beside the policy, and makes one AdamW step on all pairs. Lucid RL computes the tokens of a
prompt once for both completions. With bfloat16, TRL trains bfloat16 weights, while Lucid RL also updates float32 master
weights.

TRL's trainer owns its loop, so the steps of Lucid RL run in its callback, in turn with TRL's steps. The time of a TRL
step is from `on_step_begin` to `on_step_end`. The benchmark checks that both sides have equal losses.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from harness import Claim, Times, arguments, print_table, report
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainerCallback
from trl import DPOConfig as TRLConfig
from trl import DPOTrainer

from lucidrl.algorithms.config import DPOConfig
from lucidrl.algorithms.preferences import SwappedReference
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.losses.interfaces import PAIR_IDS
from lucidrl.losses.preference import PREFERENCE, REFERENCE_SUMS, PreferenceLoss
from lucidrl.models.embedded import embedded_model, embedded_tokenizer
from lucidrl.models.loading import load_tokenizer
from lucidrl.models.policy.config import OptimizerConfig, PolicyConfig, Precision, SequencePackingConfig
from lucidrl.models.policy.policy import Policy

LEARNING_RATE, BETA = 1e-5, 0.1
WARMUPS = 2


@dataclass(frozen=True)
class Case:
    """A model, and the size of a step."""

    label: str
    source: str | None
    """Folder of the model; None is the embedded architecture with random weights."""
    precision: Precision
    num_pairs: int
    length: int
    """Tokens of the prompt, and of each completion."""
    num_steps: int
    target: float


def tokens(case: Case, vocabulary: int) -> dict[str, torch.Tensor]:
    """Return random ids of prompts, chosen and rejected completions, all of the same length."""
    generator = torch.Generator().manual_seed(0)
    names, shape = ("prompt", "chosen", "rejected"), (case.num_pairs, case.length)
    return {name: torch.randint(10, vocabulary - 10, shape, generator=generator) for name in names}


class LucidSide:
    """A policy with its reference copy, and the time and loss of each step."""

    def __init__(self, case: Case, folder: Path, tokenizer: PreTrainedTokenizerBase, ids: dict[str, torch.Tensor]):
        budget = 4 * case.length * case.num_pairs
        config = PolicyConfig(
            model_name=str(folder),
            precision=case.precision,
            optimizer=OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
            sequence_packing=SequencePackingConfig(train_mb_tokens=budget, logprob_mb_tokens=budget),
        )
        self._policy = Policy(config, tokenizer)
        self._reference = SwappedReference(self._policy)
        rows = [torch.cat([ids["prompt"], ids[name]], dim=1) for name in ("chosen", "rejected")]
        is_completion = torch.arange(2 * case.length) >= case.length
        self._batch: BatchedDataDict[Any] = BatchedDataDict(
            {
                "input_ids": torch.stack(rows, dim=1).flatten(0, 1),
                "input_lengths": torch.full((2 * case.num_pairs,), 2 * case.length),
                "token_mask": is_completion.float().expand(2 * case.num_pairs, -1),
                "sample_mask": torch.ones(2 * case.num_pairs),
                PREFERENCE: torch.tensor([1.0, -1.0]).repeat(case.num_pairs),
                PAIR_IDS: torch.arange(case.num_pairs).repeat_interleave(2),
            }
        )
        self._loss_fn = PreferenceLoss(DPOConfig(beta=BETA))
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self) -> None:
        start = time.perf_counter()
        self._batch[REFERENCE_SUMS] = self._reference.sums(self._batch)
        self.losses.append(self._policy.train(self._batch, self._loss_fn).loss)
        self.seconds.append(time.perf_counter() - start)


class TakeTurns(TrainerCallback):
    """Times TRL's steps, and runs a Lucid RL step after each."""

    def __init__(self, lucid: LucidSide):
        self._lucid, self._start = lucid, 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self._lucid.step()

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def trl_trainer(
    case: Case, folder: Path, tokenizer: PreTrainedTokenizerBase, ids: dict[str, torch.Tensor], turns: TakeTurns
) -> DPOTrainer:
    config = TRLConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.num_pairs,
        gradient_accumulation_steps=1,
        beta=BETA,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        optim="adamw_torch_fused",
        max_steps=WARMUPS + case.num_steps,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    dtype = getattr(torch, case.precision)
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        ref_model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
        callbacks=[turns],
    )
    # The trainer would tokenize texts; these rows have the ids that it makes of them.
    rows = [{f"{name}_ids": column[pair].tolist() for name, column in ids.items()} for pair in range(case.num_pairs)]
    trainer.train_dataset = Dataset.from_list(rows)
    return trainer


def measure(case: Case) -> Claim:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.source is None:
            model, tokenizer = embedded_model(warm=False, seed=0, attn_implementation="sdpa"), embedded_tokenizer()
        else:
            dtype = getattr(torch, case.precision)
            model = AutoModelForCausalLM.from_pretrained(case.source, dtype=dtype)
            tokenizer = load_tokenizer(case.source)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ids = tokens(case, model.config.vocab_size)
        lucid = LucidSide(case, folder, tokenizer, ids)
        turns = TakeTurns(lucid)
        trl_trainer(case, folder, tokenizer, ids, turns).train()
    pairs = zip(lucid.losses, turns.losses, strict=False)
    print(f"{case.label}, losses: " + ", ".join(f"{ours:.4f} (TRL {theirs:.4f})" for ours, theirs in pairs))
    times = Times({"lucidrl": lucid.seconds[WARMUPS:], "trl": turns.seconds[WARMUPS:]})
    tokens_of_row = f"{case.num_pairs} pairs, prompt and completion of {case.length} tokens"
    row = (f"{case.label}, {tokens_of_row}", f"{times.median('lucidrl'):.3f} s", f"{times.median('trl'):.3f} s")
    print_table([row], header=("DPO step", "Lucid RL", "TRL"))
    return Claim(f"DPO step vs TRL, {case.label}", case.target, times.speedup("lucidrl", "trl"))


def main() -> None:
    options = arguments(__doc__, model=(str, ".cache/smollm2", "folder of SmolLM2"))
    torch.set_num_threads(options.threads)
    cases = [
        Case("0.8 million parameters, float32", None, "float32", num_pairs=16, length=128, num_steps=10, target=1.0),
        Case("SmolLM2, bfloat16", options.model, "bfloat16", num_pairs=2, length=128, num_steps=5, target=1.0),
    ]
    report([measure(case) for case in cases], options.json)


if __name__ == "__main__":
    main()
