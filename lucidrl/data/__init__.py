"""Prompts, supervised examples, chat messages as token ids, and batches of them."""
