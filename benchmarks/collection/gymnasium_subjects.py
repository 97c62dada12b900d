"""Loops over gymnasium's own environments."""

from __future__ import annotations

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from collection.tasks import bare_loops, vector_loop

SUBJECTS = {
    "SyncVectorEnv x8": vector_loop(SyncVectorEnv),
    "AsyncVectorEnv x8": vector_loop(AsyncVectorEnv),
    "two bare loops in two processes": bare_loops(2),
}
