"""Asking a trained model from the command line."""

from __future__ import annotations

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
from lucidrl.recipes.run_folder import CHECKPOINTS_NAME, CONFIG_NAME
from lucidrl.utils.device import default_device


def ask(source: Path, prompt: str, samples: int, temperature: float, max_new_tokens: int, seed: int) -> list[str]:
    """Answers of the newest checkpoint of a run, or of a model folder; a single one is greedy."""
    name = str(_model_folder(source))
    tokenizer = load_tokenizer(name)
    model = LogprobModel(load_model(name, torch.float32), temperature).to(default_device())
    config = GenerationConfig(max_new_tokens=max_new_tokens, temperature=temperature)
    generator = BuiltinGenerator(model, tokenizer, config, seed=seed)
    ids = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": prompt}])] * samples)
    data: BatchedDataDict[GenerationDatumSpec] = BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.full((samples,), ids.shape[1])}
    )
    output = generator.generate(data, greedy=samples == 1).to("cpu")
    ends = output["unpadded_sequence_lengths"].tolist()
    answers = [row[ids.shape[1] : end] for row, end in zip(output["output_ids"], ends, strict=True)]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def _model_folder(source: Path) -> Path:
    if (source / "config.json").is_file():
        return source
    if not (source / CONFIG_NAME).is_file():
        raise ConfigError(f"{source} is neither a run folder nor a model folder; give runs/<algorithm>/exp_NNN")
    checkpoint = CheckpointManager(source / CHECKPOINTS_NAME).latest()
    if checkpoint is None:
        raise CheckpointError(f"{source} holds no valid checkpoint yet; let the run go on until it has saved one")
    if not (checkpoint.path / WEIGHTS / "config.json").is_file():
        raise ConfigError(
            f"{source} holds no language model, so there is nothing to ask; give a run of lucidrl grpo or sft "
            "(docs/control.md shows how to play a trained control policy)"
        )
    return checkpoint.path / WEIGHTS
