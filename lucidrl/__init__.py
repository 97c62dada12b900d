"""Lucid RL: reinforcement-learning post-training you can see through.

Importing this package loads nothing heavy; torch and the rest are imported by the modules that use them.
"""

from lucidrl.profiling.gate import set_profiling_enabled

__version__ = "0.1.0"

__all__ = ["__version__", "set_profiling_enabled"]
