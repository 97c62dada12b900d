"""Losses, advantages and the training loops that use them."""
