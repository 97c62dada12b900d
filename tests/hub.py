"""A stand-in for the Hugging Face hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT}


class Hub:
    """Repositories in memory, by `models/ORG/NAME` or `datasets/ORG/NAME`, and the requests for them."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        """Repositories that list their files, but do not give them."""
        self.status: int | None = None
        """Answer everything with this status."""
        self.requests: list[str] = []
        self.url = ""

    def add(self, repository: str, files: Mapping[str, bytes] | Path) -> None:
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        self.files[repository] = dict(files)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and content for a path."""
        if self.status is not None:
            return self.status, {}, b""
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            repository, asked = "/".join(parts[1:4]), parts[4:] or ["revision", "main"]
        else:
            start = 1 if parts[0] == "datasets" else 0
            kind = "datasets" if start else "models"
            repository, asked = "/".join([kind, *parts[start : start + 2]]), parts[start + 2 :]
        if repository not in self.files:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        action, revision, *rest = asked
        if revision not in REVISIONS:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = self.files[repository]
        if action == "revision":
            return 200, {}, json.dumps({"id": repository.partition("/")[2], "sha": COMMIT, "siblings": []}).encode()
        if action == "tree":
            tree = [
                {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}
                for name, content in files.items()
            ]
            return 200, {}, json.dumps(tree).encode()
        if repository in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        content = files["/".join(rest)]
        return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


@contextmanager
def served_hub() -> Iterator[Hub]:
    """Serve a hub until the end of the context."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(path)
            status, headers, content = hub.answer(path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False) -> None:
    """Let this process use the stand-in; huggingface_hub reads its variables only once, when it is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
