"""Monitors every node of a Ray cluster with the metrics that Ray exports."""

from __future__ import annotations

import asyncio
import email
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.monitor import BYTES_PER_GB, Monitor

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# Ray's name → our name and divisor: node memory is in bytes, GPU memory in units of 1024**2 bytes.
_NODE_METRICS = {
    "ray_node_cpu_utilization": ("cpu.util", 1),
    "ray_node_mem_used": ("mem_gb", BYTES_PER_GB),
    "ray_node_mem_total": ("mem_total_gb", BYTES_PER_GB),
}
_GPU_METRICS = {
    "ray_node_gpus_utilization": ("util", 1),
    "ray_node_gram_used": ("mem_gb", 1024),
}
_WANTED_LINE = re.compile(rf"^[ \t]*(?:{'|'.join(_NODE_METRICS | _GPU_METRICS)})[ \t{{].*\n", re.MULTILINE)
_HEAD_RESOURCE = "node:__internal_head__"
_MOST_REPLY_BYTES = 16 * 1024**2


class RayGpuMonitorLogger(Monitor):
    """Monitors all nodes of the Ray cluster that this process is connected to.

    Node 0 is the head; the others are numbered as they appear, and numbers are never reused. A node that returns no
    valid page within the interval (at least 1, at most 5 seconds) is left out of that snapshot, with one warning.
    """

    @cached_property
    def _indices(self) -> dict[str, int]:
        """Index of each node seen so far, by node id."""
        return {}

    def _check(self) -> None:
        for package in ("ray", "prometheus_client"):
            require_package(package, type(self).__name__, extra="ray")
        import ray

        if not ray.is_initialized():
            raise ConfigError("Ray is not initialised; call ray.init() first, or use LocalMonitorLogger")

    def _collect(self, metrics: bool = False, sku: bool = False) -> dict[str, Any]:
        def parse(sample: Sample, node_idx: int) -> dict[str, Any]:
            found = self._parse_metric(sample, node_idx) if metrics else {}
            return found | self._parse_gpu_sku(sample, node_idx) if sku else found

        addresses = self._metric_addresses()

        async def query_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*(self._query(*node, parse) for node in addresses.items()))

        return {name: value for of_node in asyncio.run(query_all()) for name, value in of_node.items()}

    def _metric_addresses(self) -> dict[int, str]:
        """`host:port` of the metrics of each live node, by its number."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: (_HEAD_RESOURCE not in node["Resources"], node["NodeID"]))
        return {self._indices.setdefault(node["NodeID"], len(self._indices)): _address(node) for node in nodes}

    def _fetch_and_parse_metrics(
        self, node_idx: int, metric_address: str, parser_fn: Callable[[Sample, int], dict[str, Any]]
    ) -> dict[str, Any]:
        """The results of `parser_fn` for the samples of one node; empty if the node does not send them in time."""
        return asyncio.run(self._query(node_idx, metric_address, parser_fn))

    async def _query(
        self, node_idx: int, metric_address: str, parser_fn: Callable[[Sample, int], dict[str, Any]]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                page = await _fetch_page(metric_address)
            for sample in _wanted_samples(page):
                found |= parser_fn(sample, node_idx)
        except Exception as error:  # any server at that address may break the parser in any way
            message = "node %d at %s sent no metrics within %g s: %r"
            self._warn_once(f"node {node_idx}", message, node_idx, metric_address, self._timeout_s, error)
            return {}
        return found

    def _parse_metric(self, sample: Sample, node_idx: int) -> dict[str, Any]:
        """The metric of a sample; empty for other samples and for missing labels."""
        if not math.isfinite(sample.value):
            return {}
        if sample.name in _NODE_METRICS:
            name, divisor = _NODE_METRICS[sample.name]
            return {f"node.{node_idx}.{name}": sample.value / divisor}
        gpu_index = _gpu_index(sample)
        if gpu_index is None:
            return {}
        name, divisor = _GPU_METRICS[sample.name]
        return {f"node.{node_idx}.gpu.{gpu_index}.{name}": sample.value / divisor}

    def _parse_gpu_sku(self, sample: Sample, node_idx: int) -> dict[str, str]:
        """The GPU model of a sample, if it has one."""
        gpu_index, gpu_type = _gpu_index(sample), sample.labels.get("GpuDeviceName")
        return {f"node.{node_idx}.gpu.{gpu_index}.type": gpu_type} if gpu_index is not None and gpu_type else {}


def _gpu_index(sample: Sample) -> int | None:
    """Number of the sample's GPU on its node; None if the sample is not of a GPU."""
    label = sample.labels.get("GpuIndex", "")
    return int(label) if sample.name in _GPU_METRICS and label.isascii() and label.isdecimal() else None


def _address(node: Mapping[str, Any]) -> str:
    host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wanted_samples(page: str) -> Iterator[Sample]:
    """The samples of our metrics. Parses only their complete lines, because the parser is slow."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families("".join(_WANTED_LINE.findall(page))):
        yield from family.samples


async def _fetch_page(address: str) -> str:
    """The page `http://<address>/metrics`; cancelling the call closes the connection.

    The usual HTTP clients limit the time of each read instead of the whole call, and follow redirects and proxies.
    Nodes have numeric addresses: a name lookup could not be cancelled.
    """
    place = urlsplit(f"//{address}")
    reader, writer = await asyncio.open_connection(place.hostname, place.port, flags=socket.AI_NUMERICHOST)
    try:
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n".encode())
        reply = bytearray()
        while chunk := await reader.read(1024**2):
            reply += chunk
            if len(reply) > _MOST_REPLY_BYTES:
                raise ValueError(f"the reply has more than {_MOST_REPLY_BYTES} bytes")
        return _page(bytes(reply))
    finally:
        writer.transport.abort()


def _page(reply: bytes) -> str:
    """The body of an HTTP reply; ValueError unless it is a complete page of metrics."""
    head, end, body = reply.partition(b"\r\n\r\n")
    status, _, fields = head.partition(b"\r\n")
    headers = email.message_from_bytes(fields)  # without a content type it assumes text/plain
    if not end or status.split()[1:2] != [b"200"] or headers.get_content_type() != "text/plain":
        raise ValueError(f"the response is not in the Prometheus text format: {head[:200]!r}")
    if headers.get("Content-Length", str(len(body))) != str(len(body)):
        raise ValueError(f"the page has {len(body)} bytes instead of {headers['Content-Length']}")
    return body.decode()
