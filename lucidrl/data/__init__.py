"""Prompts, conversations as token ids, and the batches made of them."""
