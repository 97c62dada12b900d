"""JudgeClient: requests replies from an OpenAI-compatible endpoint, with retries, and never shows the API key."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from lucidrl.errors import ConfigError
from lucidrl.rewards.interfaces import ParseFailure
from lucidrl.rewards.judge.config import JudgeConfig
from lucidrl.rewards.judge.http import BadResponse, HttpClient, Response
from lucidrl.utils.logger.redact import REDACTED, redacted_text

_log = logging.getLogger(__name__)

FailureKind = Literal["timeout", "rate_limited", "http_error", "connection_error", "bad_response"]

MAX_RESPONSE_BYTES = 4 << 20
_MOST_BACKOFF_S = 30.0
_CHECK_TIMEOUT_S = 5.0
_MOST_SHOWN_CHARS = 200
_RETRIED_STATUSES = (408, 429)
"""HTTP statuses after which a request is retried, in addition to 5xx."""
_KEY_STATUSES = (401, 403)
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class RequestFailed(Exception):  # noqa: N818 - an outcome of a request, not an error of the program
    """A request that has no reply.

    Args:
        detail: the reason, without the API key.
        is_retried: whether the same request may succeed later.
        retry_after_s: how long the server asks to wait before a retry; 0 if it does not.
    """

    def __init__(self, kind: FailureKind, detail: str, *, is_retried: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(detail)
        self.kind = kind
        self.is_retried = is_retried
        self.retry_after_s = retry_after_s


@dataclass
class Spent:
    """What the requests for one completion cost so far."""

    requests: int = 0
    seconds: float = 0.0

    @property
    def retries(self) -> int:
        return max(0, self.requests - 1)


class JudgeClient:
    """Sends chat requests to the endpoint of an LLM judge.

    Args:
        config: the environment variable `config.key_variable` is read once, now.

    Raises:
        ConfigError: the variable is unset, or holds no valid key.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._key = _key_of(config)
        self._http = HttpClient(config.base_url, MAX_RESPONSE_BYTES)
        self._random = random.SystemRandom()  # leaves the random state of the run alone
        if self._key and not self._http.is_encrypted and self._http.host not in _LOCAL_HOSTS:
            text = "the key of %s is sent to %s without encryption; use an https address in reward.kwargs.base_url"
            _log.warning(text, config.key_variable, self._http.host)

    def body_of(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The request for a reply to the messages, without the key."""
        config = self._config
        body = {"temperature": config.temperature, "max_tokens": config.max_tokens, **config.extra_body}
        body = {name: value for name, value in body.items() if value is not None}
        return {"model": config.model, "messages": list(messages), **body}

    async def reply(self, body: Mapping[str, Any], timeout_s: float, spent: Spent) -> str:
        """Return the text of the reply; retry failed requests.

        Args:
            body: a result of `body_of`.
            timeout_s: timeout of all requests together, with the waits between them.
            spent: counts the requests.

        Raises:
            RequestFailed: no request succeeded.
            ParseFailure: the reply is empty, or was cut at the most tokens of a reply.
        """
        ends = time.monotonic() + timeout_s
        content = json.dumps(body).encode()
        while True:
            rest_s = ends - time.monotonic()
            try:
                return await self._reply_once(content, min(self._config.request_timeout_s, rest_s), spent)
            except RequestFailed as failure:
                if not failure.is_retried:
                    raise
                after = f"{failure} after {spent.requests} requests" if spent.retries else str(failure)
                if spent.retries >= self._config.max_retries:
                    raise RequestFailed(failure.kind, after) from failure
                wait_s = max(self._backoff_s(spent.retries), failure.retry_after_s)
                if time.monotonic() + wait_s >= ends:
                    detail = f"{after}; a retry in {wait_s:.3g} s would exceed timeout_s={timeout_s:g}"
                    raise RequestFailed(failure.kind, detail) from failure
            await asyncio.sleep(wait_s)

    async def check(self) -> None:
        """Raise ConfigError if the endpoint cannot be reached, or refuses the key; request no completion."""
        config = self._config
        try:
            response = await self._exchange("GET", "/models", b"", _CHECK_TIMEOUT_S)
        except RequestFailed as failure:
            raise ConfigError(
                f"the LLM judge at {config.base_url} cannot be reached: {failure}; start its server, or fix "
                "reward.kwargs.base_url"
            ) from None
        if response.status in _KEY_STATUSES or 300 <= response.status < 400 or response.status in (500, 502, 503, 504):
            reason = self._failure_of(response)
            raise ConfigError(
                f"the LLM judge at {config.base_url} is not ready: {reason}; fix the endpoint, or "
                "reward.kwargs.base_url and key_variable"
            )

    async def _reply_once(self, content: bytes, timeout_s: float, spent: Spent) -> str:
        spent.requests += 1
        start = time.monotonic()
        try:
            response = await self._exchange("POST", "/chat/completions", content, timeout_s)
        finally:
            spent.seconds += time.monotonic() - start
        if response.status != 200:
            raise self._failure_of(response)
        return self._text_of(response)

    async def _exchange(self, method: str, path: str, content: bytes, timeout_s: float) -> Response:
        headers = {"Accept": "application/json", "User-Agent": "lucidrl"}
        if content:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = asyncio.timeout(timeout_s)
        try:
            async with timeout:
                return await self._http.request(method, path, headers, content)
        except BadResponse as error:
            raise RequestFailed("bad_response", str(error)) from error
        except OSError as error:  # TimeoutError is one of them
            if timeout.expired():
                detail = f"no whole reply within {timeout_s:.3g} s"
                raise RequestFailed("timeout", detail, is_retried=True) from error
            if isinstance(error, ssl.SSLCertVerificationError):
                detail = f"the certificate cannot be verified: {error.verify_message}"
                raise RequestFailed("connection_error", detail) from error
            detail = f"connection error: {self._shown(str(error) or type(error).__name__)}"
            raise RequestFailed("connection_error", detail, is_retried=True) from error

    def _failure_of(self, response: Response) -> RequestFailed:
        status = response.status
        if status in _KEY_STATUSES:  # the body often repeats parts of the key
            name = self._config.key_variable
            remedy = f"the server refuses the key in variable {name}" if name else "the server needs a key"
            return RequestFailed("http_error", f"HTTP {status}: {remedy}; set key_variable to a variable with a key")
        if 300 <= status < 400:
            target = self._shown(response.headers.get("Location", "another address"))
            return RequestFailed("bad_response", f"HTTP {status}: redirect to {target}, which is not followed")
        text = self._shown(response.body.decode("utf-8", "replace"))
        return RequestFailed(
            "rate_limited" if status == 429 else "http_error",
            f"HTTP {status}: {text}" if text else f"HTTP {status}",
            is_retried=status in _RETRIED_STATUSES or status >= 500,
            retry_after_s=_seconds_of(response.headers.get("Retry-After", "")),
        )

    def _text_of(self, response: Response) -> str:
        try:
            choice = json.loads(response.body)["choices"][0]
            text = choice["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            shown = self._shown(response.body.decode("utf-8", "replace"))
            raise RequestFailed("bad_response", f"the response is not a chat completion: {shown!r}") from error
        if text is None or (isinstance(text, str) and not text.strip()):
            reason = self._shown(str(choice.get("finish_reason")))
            raise ParseFailure(f"the reply is empty (finish_reason={reason}); raise reward.kwargs.max_tokens")
        if not isinstance(text, str):
            raise RequestFailed("bad_response", f"the content of the reply is a {type(text).__name__}, not a string")
        if choice.get("finish_reason") == "length":  # a number at its end may be a part of the score
            raise ParseFailure(f"the reply was cut at {self._most_tokens()}; raise reward.kwargs.max_tokens")
        return self._without_key(text.encode("utf-8", "replace").decode())

    def _most_tokens(self) -> str:
        """The limit of a reply, as requests hold it."""
        config = self._config
        limits = {"max_tokens": config.max_tokens, **config.extra_body}
        names = ("max_completion_tokens", "max_tokens")
        return next((f"{name}={limits[name]}" for name in names if limits.get(name) is not None), "the server's limit")

    def _backoff_s(self, num_retries: int) -> float:
        longest_s = min(_MOST_BACKOFF_S, self._config.backoff_s * 2.0 ** min(num_retries, 60))
        return longest_s * self._random.uniform(0.5, 1.0)

    def _shown(self, text: str) -> str:
        """Prepare a string from the server for an error message: short, in one line, without secrets."""
        line = "".join(character if character.isprintable() else " " for character in text)
        text = redacted_text(self._without_key(" ".join(line.split())))
        return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, REDACTED) if self._key else text


def _key_of(config: JudgeConfig) -> str:
    """The API key, or an empty string if none is configured."""
    name = config.key_variable
    if name is None:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable {name} of reward.kwargs.key_variable is not set; set it to the API key of "
            f"{config.base_url}, or remove key_variable"
        )
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ConfigError(f"the environment variable {name} holds spaces or special characters; set it to an API key")
    return key


def _seconds_of(retry_after: str) -> float:
    """The value of the header `Retry-After`, in seconds; 0 if it is missing or malformed."""
    value = retry_after.strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", value, re.ASCII):
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
