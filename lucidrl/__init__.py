"""Lucid RL: reinforcement-learning post-training you can see through.

Importing this package loads nothing heavy; torch and the rest are imported by the modules that use them.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
