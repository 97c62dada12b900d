"""The use of every node of a Ray cluster, read from the metrics that Ray itself exports."""

from __future__ import annotations

import asyncio
import io
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from http.client import parse_headers
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lucidrl.errors import ConfigError
from lucidrl.utils.imports import require_package
from lucidrl.utils.logger.monitor import BYTES_PER_GB, Monitor

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# Ray's name → our name, and what to divide by: node memory is in bytes, GPU memory in units of 1024**2 bytes.
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
_MOST_PAGE_BYTES = 16 * 1024**2


class RayGpuMonitorLogger(Monitor):
    """Looks at all nodes of the Ray cluster that this process is connected to.

    Node 0 is the head, the others are numbered as they first appear; a number is never given to another node. Nodes
    are asked at the same time. One that gives no usable answer within the interval (at least 1, at most 5 seconds) is
    left out of that look, and warned about once.
    """

    @cached_property
    def _indices(self) -> dict[str, int]:
        """Numbers of the nodes seen so far, by their ids."""
        return {}

    def _check(self) -> None:
        for package in ("ray", "prometheus_client"):
            require_package(package, type(self).__name__, extra="ray")
        import ray

        if not ray.is_initialized():
            raise ConfigError(
                "RayGpuMonitorLogger cannot start: Ray is not initialised; call ray.init() before, "
                "or use LocalMonitorLogger for this machine alone"
            )

    def _collect(self, metrics: bool = False, sku: bool = False) -> dict[str, Any]:
        def parse(sample: Sample, node_idx: int) -> dict[str, Any]:
            found = self._parse_metric(sample, node_idx) if metrics else {}
            return found | self._parse_gpu_sku(sample, node_idx) if sku else found

        addresses = self._metric_addresses()

        async def ask_all() -> list[dict[str, Any]]:
            return await asyncio.gather(*(self._ask(*node, parse) for node in addresses.items()))

        return {name: value for of_node in asyncio.run(ask_all()) for name, value in of_node.items()}

    def _metric_addresses(self) -> dict[int, str]:
        """`host:port` of the metrics of each node that is alive, by the number of the node."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        nodes.sort(key=lambda node: (_HEAD_RESOURCE not in node["Resources"], node["NodeID"]))
        return {self._indices.setdefault(node["NodeID"], len(self._indices)): _address(node) for node in nodes}

    def _fetch_and_parse_metrics(
        self, node_idx: int, metric_address: str, parser_fn: Callable[[Sample, int], dict[str, Any]]
    ) -> dict[str, Any]:
        """What `parser_fn` makes of the samples of one node; nothing if the node does not give them in time."""
        return asyncio.run(self._ask(node_idx, metric_address, parser_fn))

    async def _ask(
        self, node_idx: int, metric_address: str, parser_fn: Callable[[Sample, int], dict[str, Any]]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(self._timeout_s):
                page = await _fetch_page(metric_address)
            for sample in _wanted_samples(page):
                found |= parser_fn(sample, node_idx)
        except Exception as error:  # whatever answers at that address may break the parser in any way
            self._warn_once(
                f"node {node_idx}",
                "node %d at %s gave no metrics within %g s: %r",
                node_idx,
                metric_address,
                self._timeout_s,
                error,
            )
            return {}
        return found

    def _parse_metric(self, sample: Sample, node_idx: int) -> dict[str, Any]:
        """The metric that a sample stands for, if it is one of ours and has the labels it should."""
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
        """The model of GPU that a sample names, if it does."""
        gpu_index, gpu_type = _gpu_index(sample), sample.labels.get("GpuDeviceName")
        return {f"node.{node_idx}.gpu.{gpu_index}.type": gpu_type} if gpu_index is not None and gpu_type else {}


def _gpu_index(sample: Sample) -> int | None:
    """Number of the GPU on its node that the sample is about, if it is about one."""
    label = sample.labels.get("GpuIndex", "")
    return int(label) if sample.name in _GPU_METRICS and label.isascii() and label.isdecimal() else None


def _address(node: Mapping[str, Any]) -> str:
    host, port = node["NodeManagerAddress"], node["MetricsExportPort"]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _wanted_samples(page: str) -> Iterator[Sample]:
    """The samples of the metrics that are read here.

    Only their lines are parsed: a page holds hundreds of kilobytes, and the parser is slow. A last line without its end
    may hold half a number, and is left out.
    """
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families("".join(_WANTED_LINE.findall(page))):
        yield from family.samples


async def _fetch_page(address: str) -> str:
    """The page `http://<address>/metrics`; a caller that stops waiting leaves nothing behind.

    An own client, because the usual ones limit each read and not the whole, and follow redirects and proxies. Nodes are
    addressed by number: no name is looked up, which could not be given up in time.
    """
    place = urlsplit(f"//{address}")
    reader, writer = await asyncio.open_connection(place.hostname, place.port, flags=socket.AI_NUMERICHOST)
    try:
        writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n".encode())
        size_bytes = _page_size(await reader.readuntil(b"\r\n\r\n"))
        page = await (_read_all(reader) if size_bytes is None else reader.readexactly(size_bytes))
        return page.decode()
    finally:
        writer.transport.abort()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    page = bytearray()
    while chunk := await reader.read(1024**2):
        page += chunk
        if len(page) > _MOST_PAGE_BYTES:
            raise ValueError(f"the page has more than {_MOST_PAGE_BYTES} bytes")
    return bytes(page)


def _page_size(head: bytes) -> int | None:
    """Length of the page that follows the head of a response, None if it goes on to the end of the connection.

    Refused if it is no page of metrics, or too long.
    """
    status, _, fields = head.partition(b"\r\n")
    if status.split()[1:2] != [b"200"]:
        raise ValueError(f"the answer is {status[:80]!r}, not a page")
    headers = parse_headers(io.BytesIO(fields))
    if headers.get_content_type() != "text/plain":  # also what it is taken for where nothing is said
        raise ValueError(f"the page is {headers.get_content_type()}, not metrics in text/plain")
    length = headers.get("Content-Length")
    if length is None:
        return None
    if not length.isdecimal() or int(length) > _MOST_PAGE_BYTES:
        raise ValueError(f"the page has {length!r} bytes, at most {_MOST_PAGE_BYTES} are read")
    return int(length)
