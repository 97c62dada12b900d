"""Environments: what acts on a policy's answers and rewards them."""
