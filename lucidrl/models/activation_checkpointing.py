"""Memory for time: layers keep their inputs alone for the backward pass, and compute the rest again."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lucidrl.models.loading import decoder_layers


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Have every decoder layer of the model do so; to be called before the model is sharded."""
    for layer in decoder_layers(model):
        # The state of random numbers is not kept for the second pass: a policy has dropout off, and draws none.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
