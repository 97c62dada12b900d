"""The plain types that prompts, environments and collectors pass to each other."""

from __future__ import annotations

from typing import Any, TypedDict


class ChatMessage(TypedDict):
    """One message, as chat templates read it."""

    role: str
    content: str


LLMMessageLogType = list[dict[str, Any]]
"""Messages with their tokens.

Every message has `role`, `content` and `token_ids` (1-d int64). Messages rendered together, such as a prompt, keep
their ids on the last of them and empty tensors on the others: a chat template does not say which message a token
belongs to. Sampled assistant messages also have `generation_logprobs` (1-d float32), one per token, and the
`policy_version` that sampled them. The concatenated `token_ids` are exactly the tokens that the model saw and sampled.
"""
