"""Merge an adapter into its base, and write the result as a model folder."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from lucidrl.checkpoint.staging import locked, make_hidden_folder, put_in_place
from lucidrl.errors import ConfigError
from lucidrl.models.adapter_folder import base_name, is_adapter
from lucidrl.models.generation.mismatch import mean_difference
from lucidrl.models.generation.probe import probe_tokens
from lucidrl.models.loading import DTYPES, load_tokenizer, load_with_adapter, model_config
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.lora import merge_adapters
from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.models.sources import model_folder
from lucidrl.recipes.text_inputs import silence_progress_bars


@dataclass(frozen=True)
class Merged:
    """What was merged."""

    source: Path
    base: str
    precision: str
    gap: float
    """Mean absolute difference of the probe's log-probabilities before and after, in nats per token."""


def merge(source: str, output: Path, base: str | None = None) -> Merged:
    """Write the base of an adapter with the adapter merged in to a new folder.

    Args:
        source: a run, checkpoint or adapter folder; see `lucidrl.models.sources`.
        base: name of the base, if it is no longer where the adapter's folder says.

    Raises:
        ConfigError: the source has no adapter, or the output exists.
        CheckpointError: the base is not the one that the adapter was trained on.
    """
    silence_progress_bars()
    if output.exists():
        raise ConfigError(f"OUT={output} exists; choose a new folder")
    folder = None if source in EMBEDDED_MODELS else model_folder(source, "RUN")
    if folder is None or not is_adapter(folder):
        raise ConfigError(
            f"RUN={source} holds a full model, not an adapter: there is nothing to merge; use it as it is"
        )
    tokenizer = load_tokenizer(str(folder))
    dtype = getattr(model_config(str(folder), False), "dtype", None) or torch.float32
    model = load_with_adapter(folder, dtype, base=base)
    probe = torch.tensor([probe_tokens(tokenizer)])
    scorer, lengths = LogprobModel(model, temperature=1.0), torch.tensor([probe.shape[1]])
    with torch.no_grad():
        separate = scorer(probe, lengths).logprobs[0, 1:]
        merge_adapters(model)
        merged = scorer(probe, lengths).logprobs[0, 1:]
    with ExitStack() as at_end:
        output.parent.mkdir(parents=True, exist_ok=True)
        hidden = make_hidden_folder(output)
        at_end.callback(shutil.rmtree, hidden, ignore_errors=True)
        at_end.enter_context(locked(hidden))
        model.save_pretrained(hidden)
        tokenizer.save_pretrained(hidden)
        put_in_place(hidden, output)
    precision = next(name for name, known in DTYPES.items() if known is dtype)
    return Merged(folder, base or base_name(folder), precision, mean_difference(merged, separate))
