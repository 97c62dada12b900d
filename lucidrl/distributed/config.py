"""Configuration of the processes that share the work."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lucidrl.utils.config import Config

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""A deadline; at most a month, which is what the libraries below can count."""


class ClusterConfig(Config):
    """How many workers there are, where they run, and how long they may take."""

    num_workers: PositiveInt = 1
    """Ranks. One runs in this process; more are processes of this machine, or of the nodes of a Ray cluster. Each has
    its own GPU if there are any."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """Who starts them: this program on its machine (`local`), or Ray, also a single one (`ray`); `auto` is `ray` if
    `address` is set, else `local`."""
    address: str | None = None
    """Ray cluster: `auto` for the one of this machine, `host:port` of its head, run on one of its nodes; `local` or
    unset, a Ray of this machine is started for the run and ended with it."""
    allow_open_dashboard: bool = False
    """Join also a cluster with a dashboard that other machines reach without a token: who does can run programs."""
    num_nodes: PositiveInt = 1
    """Nodes of the Ray cluster over which the workers are spread, equally many on each."""
    num_cpus_per_worker: PositiveFloat | None = None
    """CPUs that Ray sets aside for a worker; by default 1, and next to nothing if Ray is started for the run, where
    workers share the cores as without it. How many it uses is `num_threads`."""
    num_gpus_per_worker: Literal[0, 1] | None = None
    """GPUs that Ray sets aside for a worker; by default 1 if the cluster has any. Without one it computes on CPUs."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of each of several workers; by default OMP_NUM_THREADS or, unset, an equal share of the cores."""
    start_timeout_s: Seconds = 600.0
    """Longest start of several workers: imports, loading of the model, joining each other."""
    call_timeout_s: Seconds = 1800.0
    """Longest time that one piece of work of several workers may take."""

    @property
    def uses_ray(self) -> bool:
        return self.launcher == "ray" or (self.launcher == "auto" and self.address is not None)

    @property
    def ranks_per_node(self) -> int:
        return self.num_workers // self.num_nodes

    def of_one(self, with_gpus: bool = True) -> ClusterConfig:
        """The same for a single worker, which is on one node; without a GPU if it needs none."""
        update = {"num_workers": 1, "num_nodes": 1}
        return self.model_copy(update=update if with_gpus else {**update, "num_gpus_per_worker": 0})

    @field_validator("address")
    @classmethod
    def _has_a_known_form(cls, address: str | None) -> str | None:
        if address in (None, "auto", "local") or re.fullmatch(r"[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
            return address
        raise ValueError(
            f"{address!r} is neither auto, local nor host:port; a ray:// address is of a client outside of the "
            "cluster, and this runs on one of its nodes"
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        of_ray = {
            "address": self.address,
            "allow_open_dashboard": self.allow_open_dashboard or None,
            "num_nodes": None if self.num_nodes == 1 else self.num_nodes,
            "num_cpus_per_worker": self.num_cpus_per_worker,
            "num_gpus_per_worker": self.num_gpus_per_worker,
        }
        told = [f"{name}={value}" for name, value in of_ray.items() if value is not None]
        if told and not self.uses_ray:
            raise ValueError(f"{told[0]} is for workers that Ray starts; set launcher=ray, or leave it out")
        if self.num_workers % self.num_nodes:
            raise ValueError(
                f"num_workers={self.num_workers} is no multiple of num_nodes={self.num_nodes}, and every node has "
                "equally many; change one of them"
            )
        return self
