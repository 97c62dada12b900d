"""Types of rows and messages that datasets, environments and collectors pass to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

Rows = Sequence[Mapping[str, Any]]
"""Rows of a dataset: a list of dictionaries, a `datasets.Dataset`, or any other sequence of mappings."""


class ChatMessage(TypedDict):
    """One message, in the form that chat templates read; other keys of a row's message reach the template too."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


KEYS_OF_TOKENS = ("token_ids", "generation_logprobs", "policy_versions")
"""Keys that a message log adds to messages; chat templates do not read them."""
LLMMessageLogType = list[dict[str, Any]]
"""Messages with their tokens.

Every message has `role`, `content` and `token_ids` (1-d int64). Of messages that were rendered together, such as
a prompt, the last one has all token ids and the others have empty tensors: a chat template does not say which message
a token belongs to. Sampled assistant messages also have `generation_logprobs` (1-d float32) and `policy_versions` (1-d
int64), the version of the weights that sampled each token. The concatenated `token_ids` are exactly the tokens that the
model saw and sampled.
"""
