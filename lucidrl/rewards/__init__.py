"""Reward functions and verifiers: they score completions against the rows of a dataset."""
