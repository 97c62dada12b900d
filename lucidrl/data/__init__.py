"""Prompts and supervised examples from datasets; chat messages as token ids, and batches of message logs."""
