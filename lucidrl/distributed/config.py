"""Configuration of workers: their number, launcher, resources and timeouts."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lucidrl.utils.config import Config

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""A timeout; at most 30 days, the limit of the underlying libraries."""


class ClusterConfig(Config):
    """Number of workers, where they run, and their timeouts."""

    num_workers: PositiveInt = 1
    """Number of ranks. A single rank runs in this process; several ranks are processes on this machine or on Ray nodes.
    If there are GPUs, each rank has its own."""
    launcher: Literal["auto", "local", "ray"] = "auto"
    """What starts the ranks: `local` is this program, on its own machine; `ray` is Ray, even for a single rank; `auto`
    is `ray` if `address` is set, else `local`."""
    address: str | None = None
    """Ray cluster to use. `auto`: the cluster that runs on this machine. `host:port`: the head node of a cluster that
    this machine belongs to. `local` or unset: a local cluster, started and stopped with the run."""
    allow_open_dashboard: bool = False
    """Join a cluster even if other machines reach its dashboard without a token and so can run programs on its
    nodes."""
    num_nodes: PositiveInt = 1
    """Number of Ray nodes that the workers run on; every node runs the same number of workers."""
    num_cpus_per_worker: PositiveFloat | None = None
    """CPUs that Ray reserves per worker. Default: 1; in a local cluster 0.01, because its workers share the cores, as
    they do without Ray. `num_threads` sets how many CPU threads a worker uses."""
    num_gpus_per_worker: Literal[0, 1] | None = None
    """GPUs that Ray reserves per worker; by default 1 if the cluster has GPUs. A worker without a GPU runs on CPUs."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads per worker, if there are several workers. Default: OMP_NUM_THREADS; if unset, the cores are divided
    equally among the workers."""
    start_timeout_s: Seconds = 600.0
    """Timeout for starting several workers: imports, loading the model, rendezvous."""
    call_timeout_s: Seconds = 1800.0
    """Timeout of one call to several workers, for instance a training step."""

    @property
    def uses_ray(self) -> bool:
        return self.launcher == "ray" or (self.launcher == "auto" and self.address is not None)

    @property
    def ranks_per_node(self) -> int:
        return self.num_workers // self.num_nodes

    def of_one(self, with_gpus: bool = True) -> ClusterConfig:
        """The same settings for a single worker on one node, optionally without a GPU."""
        update = {"num_workers": 1, "num_nodes": 1}
        return self.model_copy(update=update if with_gpus else {**update, "num_gpus_per_worker": 0})

    @field_validator("address")
    @classmethod
    def _has_a_known_form(cls, address: str | None) -> str | None:
        if address in (None, "auto", "local") or re.fullmatch(r"[\w.-]+:\d+|\[[\da-fA-F:]+\]:\d+", address):
            return address
        raise ValueError(
            f"{address!r} is neither auto, local nor host:port; ray:// addresses are for clients outside of the "
            "cluster, but this program must run on a node of the cluster"
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
        found = [f"{name}={value}" for name, value in of_ray.items() if value is not None]
        if found and not self.uses_ray:
            raise ValueError(f"{found[0]} is for workers that Ray starts; set launcher=ray, or remove the setting")
        if self.num_workers % self.num_nodes:
            raise ValueError(
                f"num_workers={self.num_workers} is not a multiple of num_nodes={self.num_nodes}, but every node runs "
                "the same number of workers; change one of them"
            )
        return self
