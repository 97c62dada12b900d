"""Losses: the protocol that policy workers call, metric reductions, and one module per family."""
