"""The Ray monitor reads the metrics that Ray exports, and survives any reply of a node."""

import itertools
import os
import socketserver
import subprocess
import sys
import threading
import time

import psutil
import pytest
import ray
from prometheus_client.samples import Sample

from lucidrl.errors import ConfigError
from lucidrl.utils.logger.ray_monitor import RayGpuMonitorLogger

LABELS = 'IsHeadNode="true",SessionName="session_1",Version="2.60.0",ip="192.0.2.1"'
GPU_0 = 'GpuDeviceName="NVIDIA H100 80GB HBM3",GpuIndex="0",GpuUuid="GPU-0"'
GPU_1 = 'GpuDeviceName="NVIDIA A10G",GpuIndex="1",GpuUuid="GPU-1"'
PAGE = f"""# HELP ray_node_gpus_utilization Total GPUs usage on a ray node
# TYPE ray_node_gpus_utilization gauge
ray_node_gpus_utilization{{{GPU_0},{LABELS}}} 75.0
ray_node_gpus_utilization{{{GPU_1},{LABELS}}} 5.0
# TYPE ray_node_gram_used gauge
ray_node_gram_used{{{GPU_0},{LABELS}}} 3072.0
ray_node_gram_used{{{GPU_1},{LABELS}}} 512.0
ray_node_gram_available{{{GPU_0},{LABELS}}} 1.0
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{{{LABELS}}} 12.5
ray_node_mem_used{{{LABELS}}} 2.147483648e+09
ray_node_mem_used_host{{{LABELS}}} 1.0
ray_node_mem_total{{{LABELS}}} 8.589934592e+09
ray_node_mem_total_host{{{LABELS}}} 1.0
"""
METRICS = {
    "node.0.cpu.util": 12.5,
    "node.0.mem_gb": 2.0,
    "node.0.mem_total_gb": 8.0,
    "node.0.gpu.0.util": 75.0,
    "node.0.gpu.0.mem_gb": 3.0,
    "node.0.gpu.1.util": 5.0,
    "node.0.gpu.1.mem_gb": 0.5,
}


def monitor(parent_logger=None, collection_interval=0.2):
    return RayGpuMonitorLogger(collection_interval, 0.2, "ray", "ray/ray_step", parent_logger)


def response(body, status="200 OK", content_type="text/plain; version=0.0.4; charset=utf-8", length=None):
    body = body.encode() if isinstance(body, str) else body
    length = len(body) if length is None else length
    return f"HTTP/1.0 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\r\n".encode() + body


def drip(data):
    """A byte now and then: never a pause that a time limit for one read would notice."""
    for byte in data:
        yield bytes([byte])
        time.sleep(0.05)


def hang():
    time.sleep(20)
    yield b""


@pytest.fixture
def serve():
    """Starts a server that replies with the chunks of a function; returns its address."""
    servers = []

    def start(chunks):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.recv(65536)
                try:
                    for chunk in chunks():
                        self.request.sendall(chunk)
                except OSError:
                    pass  # the monitor hung up

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return server.server_address

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def set_nodes(monkeypatch):
    """Puts (NodeID, address) pairs, of which those named "head" are the head, in the place of Ray's nodes."""

    def replace(*nodes, dead=()):
        table = [
            {
                "NodeID": str(node_id),
                "Alive": node_id not in dead,
                "NodeManagerAddress": host,
                "MetricsExportPort": port,
                "Resources": {"CPU": 1.0} | ({"node:__internal_head__": 1.0} if node_id == "head" else {}),
            }
            for node_id, (host, port) in nodes
        ]
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "nodes", lambda: table)

    return replace


def test_ray_names_and_units_become_ours(serve, set_nodes):
    set_nodes(("head", serve(lambda: [response(PAGE)])))
    assert monitor()._collect_metrics() == METRICS
    assert monitor()._collect_gpu_sku() == {
        "node.0.gpu.0.type": "NVIDIA H100 80GB HBM3",
        "node.0.gpu.1.type": "NVIDIA A10G",
    }
    assert monitor()._collect() == {}


@pytest.mark.parametrize(
    "sample",
    [
        Sample("ray_node_gpus_utilization", {}, 1.0),
        Sample("ray_node_gpus_utilization", {"GpuIndex": ""}, 1.0),
        Sample("ray_node_gram_used", {"GpuIndex": "-1"}, 1.0),
        Sample("ray_node_gram_used", {"GpuIndex": "²"}, 1.0),
        Sample("ray_node_mem_used", {}, float("nan")),
        Sample("ray_node_mem_used_host", {"GpuIndex": "0"}, 1.0),
    ],
    ids=str,
)
def test_a_sample_with_missing_or_odd_parts_is_ignored(sample):
    assert monitor()._parse_metric(sample, node_idx=0) == {}
    assert monitor()._parse_gpu_sku(sample, node_idx=0) == {}


def test_a_gpu_without_a_model_still_has_metrics():
    sample = Sample("ray_node_gpus_utilization", {"GpuIndex": "3"}, 50.0)
    assert monitor()._parse_metric(sample, node_idx=2) == {"node.2.gpu.3.util": 50.0}
    assert monitor()._parse_gpu_sku(sample, node_idx=2) == {}


def test_the_head_is_node_0_and_numbers_are_never_reused(serve, set_nodes):
    def page(value):
        return serve(lambda: [response(f"ray_node_cpu_utilization {value}\n")])

    head, first, second, third = (page(value) for value in range(4))
    ray_monitor = monitor()
    set_nodes(("b", second), ("a", first), ("head", head))
    assert ray_monitor._collect_metrics() == {f"node.{i}.cpu.util": i for i in range(3)}
    set_nodes(("0", third), ("a", first), ("b", second), ("head", head), dead={"a"})
    assert ray_monitor._collect_metrics() == {f"node.{i}.cpu.util": i for i in (0, 2, 3)}
    set_nodes(("a", first), ("0", third), ("head", head))
    assert ray_monitor._collect_metrics() == {f"node.{i}.cpu.util": i for i in (0, 1, 3)}


def test_a_node_may_have_an_ipv6_address(set_nodes):
    ray_monitor = monitor()
    set_nodes(("head", ("fd00::1", 8080)))
    assert ray_monitor._metric_addresses() == {0: "[fd00::1]:8080"}


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        os.urandom(100_000),
        b"HTTP/1.0 200 OK\r\nContent-Type: text/pl",
        b"HTTP/1.0 200 OK\r\n" + b"X: " + b"a" * 200_000,
        response(PAGE, status="404 Not Found"),
        response("<html>ray_node_mem_used 1</html>", content_type="text/html"),
        response(PAGE, length=len(PAGE) + 1),
        response(PAGE, length="many"),
        response(b"\xff\xfe" * 1000),
        response("ray_node_mem_used{ 1\n"),
        response("ray_node_mem_used one\n"),
        response(PAGE.encode() + b"\nray_node_mem_used{a=b} 1\n"),
    ],
    ids=[
        "closed at once",
        "binary",
        "half a head",
        "endless head",
        "not found",
        "html",
        "cut off",
        "odd length",
        "no text",
        "no labels",
        "no number",
        "no quotes",
    ],
)
def test_a_reply_that_is_no_page_of_metrics_is_ignored_with_one_warning(serve, set_nodes, caplog, reply):
    set_nodes(("head", serve(lambda: [response(PAGE)])), ("other", serve(lambda: [reply])))
    ray_monitor = monitor()
    for _ in range(2):
        assert ray_monitor._collect_metrics() == METRICS
    assert len(caplog.records) == 1
    assert "node 1 at 127.0.0.1:" in caplog.text


def test_a_page_may_come_without_type_and_length(serve, set_nodes):
    set_nodes(("head", serve(lambda: [f"HTTP/1.0 200 OK\r\n\r\n{PAGE}".encode()])))
    assert monitor()._collect_metrics() == METRICS


def test_one_node_can_be_queried_alone(serve):
    host, port = serve(lambda: [response(PAGE)])
    ray_monitor = monitor()
    assert ray_monitor._fetch_and_parse_metrics(0, f"{host}:{port}", ray_monitor._parse_metric) == METRICS


def test_a_page_without_our_metrics_is_no_reason_to_warn(serve, set_nodes, caplog):
    set_nodes(("head", serve(lambda: [response("# nothing yet\nother_metric 1\n")])))
    assert monitor()._collect_metrics() == {}
    assert not caplog.records


def test_half_a_number_is_not_taken_for_a_number(serve, set_nodes):
    set_nodes(("head", serve(lambda: [response("ray_node_cpu_utilization 5.0\nray_node_mem_used 8.58993459")])))
    assert monitor()._collect_metrics() == {"node.0.cpu.util": 5.0}


def client_sockets(ports):
    connections = psutil.Process().net_connections("tcp")
    return [connection for connection in connections if connection.raddr and connection.raddr.port in ports]


@pytest.mark.slow
def test_nodes_that_hang_or_drip_delay_nothing_and_leave_no_socket_or_thread(serve, set_nodes, caplog):
    page = response(PAGE)
    body = page.index(b"# HELP")
    slow = [
        serve(hang),
        serve(lambda: drip(page)),
        serve(lambda: itertools.chain([page[:body]], drip(page[body:]))),
        serve(lambda: itertools.repeat(b"x" * 1_000_000, 100)),
        serve(lambda: itertools.chain([b"HTTP/1.0 200 OK\r\n\r\n"], itertools.repeat(b"x" * 1_000_000, 100))),
        serve(lambda: itertools.chain([response(b"", length=10**8)], itertools.repeat(b"x" * 1_000_000, 100))),
    ]
    set_nodes(("head", serve(lambda: [page])), *enumerate(slow), (9, ("no.such.name", 1)), (10, ("127.0.0.1", 1)))
    ray_monitor = monitor()
    for _ in range(2):
        start = time.monotonic()
        assert ray_monitor._collect_metrics() == METRICS
        assert time.monotonic() - start < 15
    assert sorted(record.args[0] for record in caplog.records) == list(range(1, 9))
    assert not client_sockets({port for _, port in slow})
    assert {thread.name.partition("(")[2] for thread in threading.enumerate() if "Thread-" in thread.name} <= {
        "serve_forever)",
        "process_request_thread)",
    }


def test_redirects_are_not_followed_and_proxies_not_used(serve, set_nodes, monkeypatch):
    good = serve(lambda: [response(PAGE)])
    moved = f"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:{good[1]}/metrics\r\n\r\n".encode()
    proxied = []
    proxy = serve(lambda: [proxied.append("proxy") or b""])
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy[1]}")
    set_nodes(("head", good), ("other", serve(lambda: [moved])))
    assert monitor()._collect_metrics() == METRICS
    assert not proxied


@pytest.mark.slow
def test_a_process_exits_at_once_while_a_node_hangs(serve):
    host, port = serve(hang)
    code = f"""
import ray, time
from lucidrl.utils.logger.ray_monitor import RayGpuMonitorLogger
ray.is_initialized = lambda: True
ray.nodes = lambda: [
    {{"NodeID": "a", "Alive": True, "NodeManagerAddress": {host!r}, "MetricsExportPort": {port}, "Resources": {{}}}}
]
RayGpuMonitorLogger(60, 60, "ray", "ray/ray_step").start()
time.sleep(0.5)
print(time.time())
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert time.time() - float(done.stdout) < 15


def test_start_without_ray_raises_with_a_remedy():
    with pytest.raises(ValueError, match=r"Ray is not initialised; call ray\.init\(\)"):
        monitor().start()


def test_a_ray_shutdown_logs_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # it was, and its nodes cannot be had any more
    ray_monitor = monitor(collection_interval=0.01)
    ray_monitor.start()
    time.sleep(0.2)
    ray_monitor.stop()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "machine metrics cannot be read for now"
    ]


def test_a_missing_package_is_one_clear_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs the package ray; pip install "lucidrl\[ray\]"'):
        monitor().start()
