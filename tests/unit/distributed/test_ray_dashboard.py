"""The address, the socket and the reply of a dashboard show who can reach it."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from lucidrl.distributed.workers.ray_cluster import _asks_for_token, _is_reachable


@pytest.mark.parametrize(("interface", "is_reachable"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_on_this_machine_the_socket_shows_whether_other_machines_reach_it(interface, is_reachable):
    with closing(socket.create_server((interface, 0))) as server:
        assert _is_reachable(f"127.0.0.1:{server.getsockname()[1]}") == is_reachable


@pytest.mark.parametrize("address", ["192.0.2.7:8265", "[2001:db8::1]:8265", "head.example:8265"])
def test_an_address_of_the_network_is_reached_by_others(address):
    assert _is_reachable(address)


@contextmanager
def serving(status: int, content: bytes):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/api/authentication_mode"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args): ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "content", "requires_token"),
    [
        (200, {"authentication_mode": "token"}, True),
        (200, {"authentication_mode": "disabled"}, False),
        (200, ["token"], False),
        (404, {}, False),
    ],
)
def test_a_dashboard_requires_a_token_if_it_reports_so(status, content, requires_token):
    with serving(status, json.dumps(content).encode()) as address:
        assert _asks_for_token(address) == requires_token


def test_a_dashboard_that_does_not_reply_counts_as_open():
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    assert not _asks_for_token(f"127.0.0.1:{port}")
