"""An OpenAI-compatible endpoint on loopback, whose behaviour a test chooses."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Behaviour = Callable[["Handler"], None]


class LLMServer:
    """Serves until the end of a `with` block.

    Attributes:
        bodies: the requests for replies so far.
        keys: the header `Authorization` of every request, None where it is missing.
        most_at_once: most requests that were in progress at the same time.
    """

    def __init__(self, behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> None:
        self.behaviour = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._num_now = 0
        self.is_closing = threading.Event()
        self.lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (Handler,), {"llm": self}))
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        if tls:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        scheme, host = ("https", "localhost") if tls else ("http", "127.0.0.1")
        self.base_url = f"{scheme}://{host}:{self._http.server_port}/v1"

    def entered(self, number: int) -> None:
        with self.lock:
            self._num_now += number
            self.most_at_once = max(self.most_at_once, self._num_now)

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.is_closing.set()
        self._http.shutdown()
        self._http.server_close()


class Handler(BaseHTTPRequestHandler):
    llm: LLMServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.llm.keys.append(self.headers.get("Authorization"))
        self.llm.behaviour(self)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.llm.lock:
            self.llm.bodies.append(body)
            self.llm.keys.append(self.headers.get("Authorization"))
        self.llm.entered(1)
        try:
            with suppress(OSError):
                self.llm.behaviour(self)
        finally:
            self.llm.entered(-1)

    def send(self, content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def chat(text: str | None, **choice: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]}).encode()


def says(text: str) -> Behaviour:
    return lambda handler: handler.send(chat(text))


def sends(content: bytes, status: int = 200, **headers: str) -> Behaviour:
    return lambda handler: handler.send(content, status, {k.replace("_", "-"): v for k, v in headers.items()})


def sends_raw(content: bytes) -> Behaviour:
    def behave(handler: Handler) -> None:
        handler.wfile.write(content)
        handler.wfile.flush()
        handler.close_connection = True

    return behave


def in_turn(behaviours: Iterable[Behaviour]) -> Behaviour:
    """Behave differently in every request; the last behaviour stays."""
    left = list(behaviours)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def hangs(handler: Handler) -> None:
    handler.llm.is_closing.wait(60)


def drips(handler: Handler) -> None:
    """Send one byte after the other of a response that never ends."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.llm.is_closing.wait(0.01):
        handler.wfile.write(b" ")
