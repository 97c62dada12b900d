"""One HTTP/1.1 request over asyncio streams, because the core install has no asynchronous HTTP client.

A request opens a connection, sends, reads a bounded response, and closes. It follows no redirect and uses no proxy, so
a key goes to the configured host and nowhere else. The caller sets the timeout: a cancelled request closes its
connection.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urlsplit

_MOST_HEADER_BYTES = 64 << 10
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?\r?\n")
_CHUNK_SIZE = re.compile(rb"([0-9a-fA-F]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_READ_BYTES = 64 << 10


class BadResponse(Exception):  # noqa: N818 - what the server did, not an error of the program
    """The server sent something that is not HTTP/1.1, or is too large."""


@dataclass(frozen=True)
class Response:
    """A whole response."""

    status: int
    headers: Message
    """Names are case-insensitive."""
    body: bytes


class HttpClient:
    """Sends requests to one address.

    Args:
        base_url: `http` or `https` address, without user, query and fragment.
        max_bytes: largest body of a response.
    """

    def __init__(self, base_url: str, max_bytes: int) -> None:
        parts = urlsplit(base_url)
        self.host = parts.hostname or ""
        self.is_encrypted = parts.scheme == "https"
        self._port = parts.port or (443 if self.is_encrypted else 80)
        self._netloc = parts.netloc
        self._path = parts.path.rstrip("/")
        self._max_bytes = max_bytes
        self._tls = ssl.create_default_context() if self.is_encrypted else None

    async def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Response:
        """Send a request and read the response.

        Args:
            path: is appended to the base address.
            headers: further headers; values must not contain line breaks.

        Raises:
            OSError: the connection cannot be made, breaks, or its certificate cannot be verified.
            BadResponse: the response is not HTTP/1.1, or too large.
        """
        own = {"Host": self._netloc, "Connection": "close", "Accept-Encoding": "identity"}
        if method != "GET":
            own["Content-Length"] = str(len(body))
        lines = [f"{method} {self._path}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**own, **headers}.items())]
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        reader, writer = await asyncio.open_connection(
            self.host, self._port, ssl=self._tls, limit=max(_MOST_HEADER_BYTES, _READ_BYTES)
        )
        try:
            writer.write(head + body)
            # A server may refuse a request before it has read all of it, so read and write at the same time.
            sending = asyncio.ensure_future(writer.drain())
            try:
                response = await self._response(reader)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            return response
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("the server closed the connection before the end of its response") from error
        except (asyncio.LimitOverrunError, http.client.HTTPException, ValueError) as error:
            raise BadResponse("the response is not HTTP/1.1, or its headers are too large") from error
        finally:
            writer.transport.abort()

    async def _response(self, reader: asyncio.StreamReader) -> Response:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            line = _STATUS_LINE.match(head)
            if line is None:
                raise BadResponse("the response is not HTTP/1.1")
            if (status := int(line[1])) >= 200:  # after 1xx, the response is still to come
                headers = http.client.parse_headers(io.BytesIO(head[line.end() :]))
                return Response(status, headers, await self._body(reader, headers))

    async def _body(self, reader: asyncio.StreamReader, headers: Message) -> bytes:
        if headers.get("Transfer-Encoding", "identity").strip().lower() != "identity":
            return await self._chunks(reader)
        if (length := headers.get("Content-Length")) is not None:
            if not re.fullmatch(r"\d{1,18}", length.strip(), re.ASCII):
                raise BadResponse("the response has no valid Content-Length")
            self._check_size(int(length))
            return await reader.readexactly(int(length))
        body = bytearray()
        while piece := await reader.read(_READ_BYTES):
            body += piece
            self._check_size(len(body))
        return bytes(body)

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = bytearray()
        while True:
            size = _CHUNK_SIZE.fullmatch(line := await reader.readline())
            if size is None:
                if not line.endswith(b"\n"):
                    raise asyncio.IncompleteReadError(line, None)
                raise BadResponse("the response has no valid chunks")
            if (length := int(size[1], 16)) == 0:
                return bytes(body)  # trailers are not read, because the connection is closed
            self._check_size(len(body) + length)
            body += await reader.readexactly(length)
            await reader.readline()

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise BadResponse(f"the response has more than {self._max_bytes:,} bytes")
