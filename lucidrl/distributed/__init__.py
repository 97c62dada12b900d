"""Batches and their division over ranks, micro-batches and packed sequences; weight transfer; worker processes."""
