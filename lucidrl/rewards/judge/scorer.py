"""JudgeScorer: renders the rubric, requests replies of the LLM judge or takes them from the cache, and reads scores."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from lucidrl.data.datasets import Prompt
from lucidrl.data.template import rendered
from lucidrl.envs.text.interfaces import EnvRequest
from lucidrl.errors import ConfigError, DataError, EnvironmentFailure
from lucidrl.rewards.config import RewardConfig, verifier_timeout_s
from lucidrl.rewards.functions import sample_values
from lucidrl.rewards.interfaces import Completion, ParseFailure
from lucidrl.rewards.judge.cache import Lookup, ReplyCache, default_folder
from lucidrl.rewards.judge.client import FailureKind, JudgeClient, RequestFailed, Spent
from lucidrl.rewards.judge.config import JudgeConfig
from lucidrl.rewards.judge.reply import score_of
from lucidrl.rewards.outcome import Verified
from lucidrl.rewards.verifiers.reading import text_of
from lucidrl.utils.config import validate

_log = logging.getLogger(__name__)

T = TypeVar("T")

_KINDS: tuple[str, ...] = tuple(kind for kind in get_args(FailureKind) if kind != "timeout")
"""Kinds of the outcome `crash`; the outcome `timeout` has no kinds."""
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Question:
    """A request, and its key in the cache."""

    body: Mapping[str, Any]
    key: str


class JudgeScorer:
    """Scores completions with an LLM judge; its outcomes are those of a verifier.

    Requests run on an event loop in a separate thread, so that reward functions that block the environment's event loop
    cause no timeouts of requests.

    Args:
        reward: config of the reward, with the options of the LLM judge in `kwargs`.

    Raises:
        ConfigError: for an unknown option, an invalid value, an unset key variable, or a cache that cannot be written.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._config = validate(JudgeConfig, dict(reward.kwargs), at="reward.kwargs")
        self._timeout_s = verifier_timeout_s(reward)
        self._client = JudgeClient(self._config)
        self._cache = _cache_of(self._config)
        self._reported: set[str] = set()
        self._is_closed = False
        self._slots = asyncio.Semaphore(self._config.max_concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="LLM judge", daemon=True)
        self._thread.start()

    async def score(self, batch: Sequence[EnvRequest]) -> list[Verified]:
        """Score the samples of a batch, in their order."""
        return await asyncio.wrap_future(self._submit(self._score_batch(batch)))

    def check(self, prompt: Prompt) -> None:
        """Raise ConfigError if the rubric cannot use the prompt's row, or the endpoint cannot be reached."""
        log: list[dict[str, Any]] = [dict(message) for message in prompt.messages]
        log.append({"role": "assistant", "content": ""})
        try:
            self._question(EnvRequest(prompt.prompt_id, log, prompt.info, turn=1), "")
        except DataError as error:
            raise ConfigError(f"the LLM judge cannot use the row of {error}") from error
        self._submit(self._client.check()).result()

    def shutdown(self) -> None:
        """Cancel all requests; may be called twice."""
        self._is_closed = True
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            coroutine.close()
            raise EnvironmentFailure("the LLM judge was shut down; make another RewardEnv")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_cancel_all())
        self._loop.close()

    async def _score_batch(self, batch: Sequence[EnvRequest]) -> list[Verified]:
        found: list[Verified | str] = []
        questions: dict[str, _Question] = {}
        for number, request in enumerate(batch):
            try:
                question = self._question(request, text_of(Completion(request.completion, 0), self._config))
            except ParseFailure as failure:
                found.append(Verified("parse_failure", detail=str(failure)))
            except DataError as error:
                found.append(Verified("crash", detail=f"{type(error).__name__}: {error}"))
            else:
                # Equal requests are sent once if replies are cached.
                key = question.key if self._cache else str(number)
                questions[key] = question
                found.append(key)
        answers = await asyncio.gather(*map(self._graded, questions.values()))
        first = dict(zip(questions, answers, strict=True))
        outcomes: list[Verified] = []
        shared: set[str] = set()
        for entry in found:
            outcomes.append(entry if isinstance(entry, Verified) else _shared(first[entry], entry in shared))
            shared |= {entry} if isinstance(entry, str) else set()
        return outcomes

    def _question(self, request: EnvRequest, completion: str) -> _Question:
        """Render the templates.

        Raises:
            DataError: a template fails for the row.
        """
        config = self._config
        limits = {"min_score": _short(config.min_score), "max_score": _short(config.max_score)}
        values = {**request.info, **sample_values(request), "completion": completion, **limits}
        place = f"prompt {request.sample_id!r}"
        messages = [{"role": "user", "content": rendered(config.rubric, values, place, "reward.kwargs.rubric")}]
        if config.system is not None:
            system = rendered(config.system, values, place, "reward.kwargs.system")
            messages.insert(0, {"role": "system", "content": system})
        body = self._client.body_of(messages)
        return _Question(body, hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest())

    async def _graded(self, question: _Question) -> Verified:
        cached = self._cache.get(question.key) if self._cache else Lookup(None)
        metrics: dict[str, float] = {"requests": 0.0, "retries": 0.0, **dict.fromkeys(_KINDS, 0.0)}
        if self._cache:
            metrics |= {"cache_hit": 0.0, "cache_damaged": float(cached.is_damaged)}
        if cached.reply is not None:
            with suppress(ParseFailure):  # the range of scores has changed: request it again
                score = score_of(cached.reply, self._config)
                return Verified("scored", score, metrics={**metrics, "cache_hit": 1.0})
        spent = Spent()
        async with self._slots:
            outcome = await self._requested(question, spent)
        metrics |= {"requests": float(spent.requests), "retries": float(spent.retries)}
        metrics["request_s"] = spent.seconds / spent.requests
        self._report(outcome)
        return replace(outcome, seconds=spent.seconds, metrics={**metrics, **outcome.metrics})

    async def _requested(self, question: _Question, spent: Spent) -> Verified:
        try:
            reply = await self._client.reply(question.body, self._timeout_s, spent)
            score = score_of(reply, self._config)
        except ParseFailure as failure:
            return Verified("parse_failure", detail=str(failure))
        except RequestFailed as failure:
            if failure.kind == "timeout":
                return Verified("timeout", detail=str(failure))
            return Verified("crash", detail=str(failure), metrics={failure.kind: 1.0})
        if self._cache:
            self._cache.put(question.key, reply)
        return Verified("scored", score)

    def _report(self, outcome: Verified) -> None:
        """Log the first timeout and the first parse failure; the environment logs crashes."""
        kind = outcome.outcome
        if kind in ("timeout", "parse_failure") and kind not in self._reported:
            self._reported.add(kind)
            text = "%s of the LLM judge (%s); later ones are not logged, only counted by the metric reward/judge/%s"
            _log.warning(text, kind.replace("_", " "), outcome.detail, kind)


def _short(number: float) -> int | float:
    """10 instead of 10.0, as a rubric shows it."""
    return int(number) if number.is_integer() else number


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _shared(outcome: Verified, is_copy: bool) -> Verified:
    """The outcome for one of several samples with equal requests; only the first of them counts the requests."""
    if not is_copy:
        return outcome
    metrics = {name: value for name, value in outcome.metrics.items() if name != "request_s"}
    is_hit = float(outcome.outcome == "scored")
    return replace(
        outcome, metrics={**metrics, "requests": 0.0, "retries": 0.0, "cache_damaged": 0.0, "cache_hit": is_hit}
    )


def _cache_of(config: JudgeConfig) -> ReplyCache | None:
    if not config.cache:
        return None
    folder = default_folder() if config.cache_dir is None else Path(config.cache_dir).expanduser()
    return ReplyCache(folder, config.cache_max_mb << 20)
