"""ModelScorer: scores completions with a reward model in a separate process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lucidrl.data.datasets import Prompt
from lucidrl.data.interfaces import KEYS_OF_TOKENS
from lucidrl.distributed.config import ClusterConfig
from lucidrl.distributed.workers.group import WorkerGroup
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.errors import ConfigError
from lucidrl.rewards.config import ModelRewardConfig, RewardConfig, verifier_timeout_s
from lucidrl.rewards.outcome import Verified
from lucidrl.utils.config import validate
from lucidrl.utils.imports import import_object

WORKER, CHECK = "lucidrl.models.reward_scorer.RewardScorer", "lucidrl.models.reward_scorer.named_model"
"""The worker, and the function that checks its folder; imported by name, because rewards know no models."""
ROLE = "reward model"


class ModelScorer:
    """Scores completions with a reward model; its outcomes are those of a verifier.

    The model is in a separate process, which scores all samples of a batch in one call. If the process exits or does
    not return within the timeout of the reward, the run stops.

    Args:
        reward: config of the reward, with the options of the reward model in `kwargs`.

    Raises:
        ConfigError: for an unknown option, or a folder without a reward model.
    """

    def __init__(self, reward: RewardConfig) -> None:
        options = validate(ModelRewardConfig, dict(reward.kwargs), at="reward.kwargs")
        folder = import_object(CHECK, "reward")(reward.model_folder)  # before a process starts
        self._group = WorkerGroup(
            import_object(WORKER, "reward"),
            (folder, options.precision, options.tokens_per_batch),
            cluster=ClusterConfig(call_timeout_s=verifier_timeout_s(reward)),
            own_processes=True,
            name="reward_model",
            role=ROLE,
        )
        self._lock = asyncio.Lock()

    async def score(self, batch: Sequence[EnvRequest]) -> list[Verified]:
        """Score the samples of a batch, in their order."""
        conversations = [_messages(request) for request in batch]
        async with self._lock:  # one call at a time
            return await asyncio.to_thread(self._scored, conversations)

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if the reward model cannot score completions of the prompt."""
        messages: list[dict[str, object]] = [dict(message) for message in prompt.messages]
        messages.append({"role": "assistant", "content": ""})
        [found] = self._scored([messages])
        if found.outcome != "scored":
            raise ConfigError(f"the reward model cannot score a completion of {prompt.label}: {found.detail}")

    def shutdown(self) -> None:
        """Stop the process; may be called twice."""
        self._group.shutdown()

    def _scored(self, conversations: Sequence[Sequence[dict[str, object]]]) -> list[Verified]:
        [scores] = self._group.run_all("score", conversations)
        return [
            Verified("crash", detail=score) if isinstance(score, str) else Verified("scored", score) for score in scores
        ]


def _messages(request: EnvRequest) -> list[dict[str, object]]:
    """Return the messages of a sample without their tokens, which are those of another model."""
    return [
        {key: value for key, value in message.items() if key not in KEYS_OF_TOKENS} for message in request.message_log
    ]
