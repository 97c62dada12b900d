"""`lucidrl generate`: complete prompts with a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lucidrl.checkpoint.manager import CheckpointManager
from lucidrl.data.messages import render_prompt
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import CheckpointError, ConfigError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.interfaces import GenerationDatumSpec
from lucidrl.models.loading import load_model, load_tokenizer
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.policy.policy import WEIGHTS
from lucidrl.recipes.folder import CHECKPOINTS_NAME, CONFIG_NAME
from lucidrl.recipes.preflight import silence_progress_bars
from lucidrl.utils.device import default_device

PROMPTS_AT_ONCE = 64
"""Prompts per generated batch; completions are printed batch by batch."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; one sample per prompt is decoded greedily."""

    samples: int = 1
    temperature: float = 1.0
    max_new_tokens: int = 64
    seed: int = 0


def completions(source: Path, prompts: Sequence[str], sampling: Sampling) -> Iterator[str]:
    """Yield `samples` completions per prompt, in order, by a model folder or the newest checkpoint of a run."""
    silence_progress_bars()
    name = str(_model_folder(source))
    tokenizer = load_tokenizer(name)
    model = LogprobModel(load_model(name, torch.float32), sampling.temperature).to(default_device())
    config = GenerationConfig(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature)
    generator = BuiltinGenerator(model, tokenizer, config, seed=sampling.seed)
    for first in range(0, len(prompts), PROMPTS_AT_ONCE):
        rows = [
            torch.tensor(render_prompt(tokenizer, [{"role": "user", "content": prompt}]))
            for prompt in prompts[first : first + PROMPTS_AT_ONCE]
            for _ in range(sampling.samples)
        ]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
        data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
        output = generator.generate(data, greedy=sampling.samples == 1).to("cpu")
        ends = output["unpadded_sequence_lengths"].tolist()
        written = [row[start:end] for row, start, end in zip(output["output_ids"], lengths.tolist(), ends, strict=True)]
        yield from tokenizer.batch_decode(written, skip_special_tokens=True)


def _model_folder(source: Path) -> Path:
    if (source / "config.json").is_file():
        return source
    if not (source / CONFIG_NAME).is_file():
        raise ConfigError(f"{source} is neither a run folder nor a model folder; choose one, such as runs/grpo/exp_001")
    checkpoint = CheckpointManager(source / CHECKPOINTS_NAME).latest()
    if checkpoint is None:
        raise CheckpointError(f"{source} holds no valid checkpoint yet; wait until the run saves one")
    if not (checkpoint.path / WEIGHTS / "config.json").is_file():
        raise ConfigError(
            f"{source} holds no language model; choose a run of lucidrl grpo or sft (docs/control.md shows how to run "
            "a trained control policy)"
        )
    return checkpoint.path / WEIGHTS
