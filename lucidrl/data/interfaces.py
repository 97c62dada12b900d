"""The plain types that prompts, environments and collectors pass to each other."""

from __future__ import annotations

from typing import Any, TypedDict


class ChatMessage(TypedDict):
    """One message of a conversation, as chat templates read it."""

    role: str
    content: str


LLMMessageLogType = list[dict[str, Any]]
"""A conversation with its tokens.

Every message has `role`, `content` and `token_ids` (1-d int64). Messages rendered together, a prompt or an
environment's reply, keep their ids on the last of them and empty tensors on the others: a chat template does not say
which message a token belongs to. Sampled assistant messages also have `generation_logprobs` (1-d float32), one for
each token, and the `policy_version` of the policy that sampled them. The concatenated `token_ids` are exactly what the
model saw and sampled.
"""
