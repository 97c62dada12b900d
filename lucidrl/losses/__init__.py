"""Losses: the protocol that policy workers call, how metrics are reduced, and one module per family."""
