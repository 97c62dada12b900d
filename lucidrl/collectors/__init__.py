"""Collectors gather experience with the current policy. Importing this package does not import torch."""

from lucidrl.utils.imports import names_imported_at_use

_HOMES = {
    "AsyncBatchedCollector": "lucidrl.collectors.async_batched",
    "Collector": "lucidrl.collectors.single",
    "ExplorationType": "lucidrl.collectors.single",
    "MultiAsyncCollector": "lucidrl.collectors.multi",
    "MultiSyncCollector": "lucidrl.collectors.multi",
    "RayCollector": "lucidrl.collectors.ray",
    "_ProfilerHook": "lucidrl.profiling.hook",
    "_maybe_record_function": "lucidrl.profiling.ranges",
    "split_trajectories": "lucidrl.collectors.trajectories",
}

__all__ = list(_HOMES)
__getattr__ = names_imported_at_use(__name__, _HOMES)
