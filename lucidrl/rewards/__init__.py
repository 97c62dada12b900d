"""Reward functions and verifiers: they score completions against the rows of a dataset."""

from lucidrl.utils.imports import names_imported_at_use

__all__ = ["reward_function"]

__getattr__ = names_imported_at_use(__name__, {"reward_function": "lucidrl.rewards.functions"})
