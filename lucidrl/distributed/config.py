"""Configuration of the processes that share the work."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from lucidrl.utils.config import Config

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""A deadline; at most a month, which is what the libraries below can count."""


class ClusterConfig(Config):
    """How many workers there are, and how long they may take."""

    num_workers: PositiveInt = 1
    """Ranks. One runs in this process; more are processes of this machine, each with its own GPU if there are any."""
    num_threads: PositiveInt | None = None
    """CPU threads of each of several workers; by default OMP_NUM_THREADS or, unset, an equal share of the cores."""
    start_timeout_s: Seconds = 600.0
    """Longest start of several workers: imports, loading of the model, joining each other."""
    call_timeout_s: Seconds = 1800.0
    """Longest time that one piece of work of several workers may take."""
