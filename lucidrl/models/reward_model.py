"""Reward models: a decoder with a linear head that scores a row at its last token.

They are Hugging Face `...ForSequenceClassification` models with one label. As there, the score of a row is that at its
last token other than the padding token.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lucidrl.checkpoint.manager import verify_part
from lucidrl.errors import ConfigError
from lucidrl.models import attention
from lucidrl.models.loading import is_reward_model, load_model, model_config, weights_of
from lucidrl.models.logprobs import LogprobModel
from lucidrl.models.model_checks import as_config_error, in_float32
from lucidrl.models.policy.config import EMBEDDED_MODELS
from lucidrl.models.sources import model_folder

_TOLERANCE = 1e-3
"""Largest allowed difference of scores from those of the model's own code, relative to the largest score."""


def scored_tokens(input_ids_BT: torch.Tensor, lengths_B: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return a mask of the token of each row at which the row is scored, [B, T] int64."""
    position_T = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device)
    counts_BT = (position_T < lengths_B[:, None]) & (input_ids_BT != pad_id)
    last_B = (position_T * counts_BT).amax(dim=1)
    return (position_T == last_B[:, None]).long()


def load_reward_model(
    model_name: str, dtype: torch.dtype, *, seed: int = 0, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a reward model, or give a language model a new score head.

    Args:
        seed: seed of a new head, and of the weights of an untrained model.

    Raises:
        ConfigError: the model cannot be loaded, or its scores differ from those of its original code.
    """
    config = model_config(model_name, trust_remote_code)
    if not is_reward_model(config):
        base = load_model(model_name, dtype, seed=seed, trust_remote_code=trust_remote_code)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _model_of(config, dtype, trust_remote_code)
        model.base_model.load_state_dict(base.base_model.state_dict())
        return model.eval()
    folder = model_folder(model_name)
    verify_part(folder)
    if config.num_labels != 1:
        raise ConfigError(
            f"{folder} has {config.num_labels} labels, but a reward model has one score; use a model with num_labels=1"
        )
    loaded: Any = weights_of(folder, AutoModelForSequenceClassification, config, dtype, trust_remote_code)
    loaded.generation_config = None  # it does not generate
    _check_against_own_forward(loaded.eval())
    return loaded


def empty_reward_model(model_name: str, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the model of `load_reward_model` on the meta device; read only its config files."""
    config = model_config(model_name, trust_remote_code)
    with torch.device("meta"):
        return _model_of(config, dtype, trust_remote_code).eval()


def check_has_score_head(model_name: str) -> None:
    """Raise ConfigError unless the folder holds a reward model; read only its config files."""
    if model_name in EMBEDDED_MODELS or not is_reward_model(model_config(model_name, trust_remote_code=False)):
        raise ConfigError(
            f"{model_name} has no score head, so it cannot score completions; train a reward model with `lucidrl "
            f"reward-model policy.model_name={model_name}`, and name its run folder"
        )


def _model_of(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.num_labels = 1
    kind = f"model_type={config.model_type!r}"
    with as_config_error(f"a reward model of {kind} cannot be built"):
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
        )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ConfigError(f"{kind} has no linear score head in transformers; use a model such as Llama, Qwen3 or Gemma")
    model.generation_config = None  # it does not generate
    return model


@torch.no_grad()
def _check_against_own_forward(model: PreTrainedModel) -> None:
    """Refuse a model whose scores in our forward pass differ from those of its original code."""
    device = next(model.parameters()).device
    pad_id = model.config.pad_token_id
    vocabulary = [id_ for id_ in range(min(40, model.config.get_text_config().vocab_size)) if id_ != pad_id]
    ids_BT = torch.tensor([vocabulary[:8], [*vocabulary[8:13], *vocabulary[:3]]], device=device)
    lengths_B = torch.tensor([8, 5], device=device)
    with in_float32(model):
        model.config._attn_implementation = "eager"
        try:
            rows = (ids[None, :length] for ids, length in zip(ids_BT, lengths_B.tolist(), strict=True))
            own_B = torch.stack([model(input_ids=row, use_cache=False).logits[0, 0] for row in rows])
        finally:
            model.config._attn_implementation = attention.NAME
        wrapped = LogprobModel(model, temperature=1.0)
        last_B = (torch.arange(len(ids_BT), device=device), lengths_B - 1)
        for packed in (False, True):
            values_B = wrapped(ids_BT, lengths_B, frozenset({"values"}), packed=packed).values[last_B]
            if not (values_B - own_B).abs().max() <= _TOLERANCE * own_B.abs().max():
                raise ConfigError(
                    f"{type(model).__name__} is not supported: its scores differ from those of our forward pass; use a "
                    "model such as Llama, Qwen3 or Gemma (docs/models.md)"
                )
