"""Batches and how they are divided: over ranks, into micro-batches, into packed sequences."""
