"""Tools: Python functions that the model calls during a sample."""
