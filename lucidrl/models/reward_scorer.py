"""The worker of `reward=model:FOLDER`: a reward model that scores conversations in batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lucidrl.data.messages import collate, supervised_example
from lucidrl.errors import ConfigError, DataError
from lucidrl.models.loading import load_tokenizer, model_facts
from lucidrl.models.policy.config import PolicyConfig, SequencePackingConfig
from lucidrl.models.policy.policy import Policy
from lucidrl.models.reward_model import check_has_score_head, scored_tokens
from lucidrl.models.sources import resolved_name


class RewardScorer:
    """Scores conversations with a reward model.

    Args:
        model_name: folder of the reward model; see `named_model`.
        precision: precision of the computations.
        tokens_per_batch: most tokens per forward pass.
    """

    def __init__(self, model_name: str, precision: str, tokens_per_batch: int) -> None:
        self._limit = min(model_facts(model_name).context_length, tokens_per_batch)
        self._tokenizer = load_tokenizer(model_name)
        self._pad_id: Any = self._tokenizer.pad_token_id
        packing = SequencePackingConfig(logprob_mb_tokens=tokens_per_batch)
        config: dict[str, Any] = {"model_name": model_name, "precision": precision, "sequence_packing": packing}
        self._policy = Policy(
            PolicyConfig(**config), self._tokenizer, init_optimizer=False, init_reference_model=False, role="reward"
        )

    def score(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[float | str]:
        """Return the score of each conversation, or the reason why it has none."""
        found: list[float | str] = [""] * len(conversations)
        logs, numbers = [], []
        for number, messages in enumerate(conversations):
            try:
                log = supervised_example(self._tokenizer, messages)
            except DataError as error:
                found[number] = str(error)
                continue
            size = sum(len(message["token_ids"]) for message in log)
            if size > self._limit:
                found[number] = f"it has {size} tokens, but the reward model reads at most {self._limit}"
                continue
            logs.append(log)
            numbers.append(number)
        if logs:
            batch = collate(logs, self._pad_id, supervised=True)
            batch["token_mask"] = scored_tokens(batch["input_ids"], batch["input_lengths"], self._pad_id).float()
            for number, score in zip(numbers, self._policy.values(batch).tolist(), strict=True):
                found[number] = score
        return found

    def shutdown(self) -> None:
        """Release the model; may be called twice."""
        self._policy.shutdown()


def named_model(name: str) -> str:
    """Return the name of a reward model that still means the same when its run has a newer checkpoint.

    Raises:
        ConfigError: there is no such model, or it has no score head.
    """
    if not name:
        raise ConfigError("reward=model: names no folder; write reward=model:FOLDER with the folder of a reward model")
    folder = resolved_name(name, "reward")
    check_has_score_head(folder)
    return folder
