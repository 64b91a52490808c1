"""A reward that asks a language model for a score."""

import asyncio
import hashlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.functions.calls import Caller, Ungraded, shipped_function
from common.http.model_endpoint import ModelEndpoint, Refused, RequestCost, Unanswered, key_from
from common.store.run_dir import RunDir
from common.text import counted
from envhub.env import EnvFailure, ServiceDown
from envhub.envs.dataset.graders import last_match
from envhub.envs.dataset.judges.options import JudgeOptions, find_model
from envhub.envs.dataset.judges.rubric import Rubric, Unparsed

logger = logging.getLogger(__name__)


MAX_ANSWERS = 100_000  # Older answers are removed.
ANSWERS_PER_CHECK = 1_000
BUSY_S = 30.0  # Seconds for which a statement waits for other processes.
BUSY_POLL_S = 0.02
SCHEMA = """
create table if not exists answers (key text primary key, answer text, tokens_in int,
    tokens_out int);
create table if not exists totals (name text primary key, num int) without rowid;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The text of a judge, with the number of tokens that it cost."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    is_cut: bool = False  # The endpoint ended it at `max_tokens`.


def key_of(request: Any) -> str:
    """Return the key of a request: a digest of its whole content."""
    text = json.dumps(request, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class JudgeStore:
    """A SQLite file with the answers by their request, and with totals. Threads may share it."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or a store in memory without one."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        place = ":memory:" if path is None else str(path)
        self._lock = threading.Lock()
        self._num_kept = 0
        self._base = sqlite3.connect(
            place, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        _use_wal(self._base)
        self._base.execute("pragma synchronous=normal")
        self._base.executescript(SCHEMA)

    def find(self, key: str) -> Answer | None:
        """Return a kept answer; None: there is none."""
        rows = self._run("select answer, tokens_in, tokens_out from answers where key=?", key)
        if not rows:
            return None
        text, tokens_in, tokens_out = rows[0]
        return Answer(text=text, prompt_tokens=tokens_in, completion_tokens=tokens_out)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; remove the oldest ones beyond `MAX_ANSWERS` from time to time."""
        values = (key, answer.text, answer.prompt_tokens, answer.completion_tokens)
        self._run("insert or replace into answers values (?, ?, ?, ?)", *values)
        self._num_kept += 1
        if self._num_kept % ANSWERS_PER_CHECK == 0:
            self.prune(MAX_ANSWERS)

    def prune(self, num: int) -> None:
        """Remove all answers but the `num` newest ones."""
        newest = "select max(rowid) from answers"
        self._run(f"delete from answers where rowid <= ({newest}) - ?", num)

    def total(self, name: str) -> int:
        """Return a total, 0 for a new one."""
        rows = self._run("select num from totals where name=?", name)
        return int(rows[0][0]) if rows else 0

    def add(self, name: str, num: int = 1, *, most: int = 0) -> bool:
        """Add to a total, unless it would exceed `most` (0: no limit); return whether it did."""
        rows = self._run(
            "insert into totals values (?1, ?2) on conflict (name) do update set num=num+?2"
            " where ?3=0 or num+?2<=?3 returning num",
            name,
            num,
            most,
        )
        return bool(rows)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._base.close()

    def _run(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a statement. Threads take turns."""
        with self._lock, closing(self._base.execute(statement, values)) as cursor:
            return cursor.fetchall()


def _use_wal(base: sqlite3.Connection) -> None:
    """Use a write-ahead log. SQLite itself does not wait for a process that does the same."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        try:
            base.execute("pragma journal_mode=wal")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(BUSY_POLL_S)
        else:
            return


MAX_REPLY_BYTES = 8 << 20
SHOWN_REPLY_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint(ModelEndpoint):
    """An endpoint of chat completions."""

    max_reply_bytes: int = MAX_REPLY_BYTES

    async def complete(self, body: dict[str, Any]) -> tuple[Answer, float]:
        """Return the answer to a request, and its seconds. Raises: Unanswered, Refused."""
        reply, took_s = await self.send(f"{self.base_url()}/chat/completions", body)
        return self._read(reply), took_s

    def _read(self, reply: dict[str, Any]) -> Answer:
        """Return the answer in a reply. Raises: Refused: the reply is no chat completion."""
        try:
            choice = reply["choices"][0]
            text = choice["message"].get("content") or ""
            usage: dict[str, Any] = reply.get("usage") or {}
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
            return Answer(
                text=text,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
                is_cut=choice.get("finish_reason") == "length",
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            shown = self.redacted(f"{reply!s:.{4 * SHOWN_REPLY_CHARS}}")[:SHOWN_REPLY_CHARS]
            raise Refused(f"not a chat completion ({error!r}): {shown}") from error


BACKOFF_S = 0.5  # Seconds before the first retry. The wait doubles with each retry.
# An equal request at temperature 0 has an equal answer. A request after an answer without a score
# has at least this temperature.
RETRY_TEMPERATURE = 0.5
CALLS = "calls"  # Total of answered requests, which `budget` limits.
PING = [{"role": "user", "content": "Reply with one word."}]
SHOWN_CHARS = 120


@dataclass(slots=True, kw_only=True)
class Cost(RequestCost):
    """The requests for one score. `as_metrics` names them for the metrics of an episode."""

    cached: int = 0  # 1 if the score came from the cache.
    unparsed: int = 0  # Answers without a score.
    unanswered: int = 0  # Requests without an answer, since the last score.

    def as_metrics(self, name: str) -> dict[str, float]:
        """Return the numbers as metrics of the judge `name`."""
        return {
            f"reward_{name}_calls": float(self.calls),
            f"reward_{name}_prompt_tokens": float(self.prompt_tokens),
            f"reward_{name}_completion_tokens": float(self.completion_tokens),
            f"reward_{name}_s": self.seconds,
            f"reward_{name}_cached": float(self.cached),
            f"reward_{name}_unparsed": float(self.unparsed),
            f"reward_{name}_unanswered": float(self.unanswered),
        }


SEARCH = shipped_function("last_match", last_match, library="re")
SEARCH_TIMEOUT_S = 2.0  # Seconds in which the pattern of the user must be found.


class Judge:
    """Asks an endpoint for scores, within its limits. One per process.

    Example: two episodes end with the same answer. One request is sent, and both get its score. The
    endpoint then goes down: `ask` raises ServiceDown, the hub pauses the environment, and `probe`
    resumes it. No score is made up.
    """

    def __init__(self, options: JudgeOptions, *, run_dir: str, num_processes: int) -> None:
        """Read the templates and the key; connect to nothing.

        Args:
            run_dir: the run directory, which holds the answers; "": they are kept in memory.
            num_processes: worker processes, which share the limit of concurrent requests.

        Raises: ConfigError: a template is wrong, or the variable with the key is not set.
        """
        self.options = options
        self.rubric = Rubric(options)
        self._run_dir = RunDir(root=Path(run_dir)) if run_dir else None
        self._slots = asyncio.Semaphore(max(1, options.concurrency // num_processes))
        self._asking: dict[str, asyncio.Task[tuple[float, Cost]]] = {}
        self._num_unanswered = 0
        self._endpoint = JudgeEndpoint(
            find_url=self._find_url,
            key=read_key(options),
            timeout_s=options.timeout_s,
            is_own=bool(options.path),
            section=f"reward.{options.name}",
        )

    @property
    def longest_s(self) -> float:
        """The most seconds of `ask`, with the wait for other requests."""
        tries = 1 + self.options.retries
        return self.options.timeout_s * tries + BACKOFF_S * (2**self.options.retries - 1)

    @cached_property
    def store(self) -> JudgeStore:
        """The answers and totals. The file is opened at the first use."""
        if self._run_dir is None:
            return JudgeStore(None)
        return JudgeStore(self._run_dir.root / "judges" / f"{self.options.name}.sqlite")

    @cached_property
    def _model_stamp(self) -> list[Any]:
        """The files of the judge's folder, whose change makes kept answers invalid."""
        if not self.options.path:
            return []
        files = sorted(find_model(self.options.path).iterdir())
        stats = [(each.name, each.stat()) for each in files if each.is_file()]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]

    def _find_url(self) -> str:
        """Return the address of the endpoint; "": it is not known yet."""
        if self.options.url:
            return self.options.url
        address = self._run_dir.find_address(self.options.role) if self._run_dir else None
        return address or ""

    async def ask(
        self, caller: Caller, offered: Mapping[str, Any], place: str
    ) -> tuple[float, Cost]:
        """Return the score of an answer in [0, 1], and its cost.

        Args:
            caller: searches the pattern of the user in a process that can be ended.
            offered: the keywords of a reward function.
            place: the record, for error messages.

        Raises:
            ServiceDown: the endpoint does not answer; the episode can be played again later.
            EnvFailure: the endpoint refuses the request, its answers have no score, or the budget
                is used up.
        """
        try:
            messages = self.rubric.messages(offered, place)
        except ConfigError as error:
            raise EnvFailure(str(error)) from error
        options = self.options
        request = self._body(messages, options.temperature)
        key = key_of([options.url, options.path, self._model_stamp, request])
        if options.cache:
            if (stored := await self._kept_score(caller, key)) is not None:
                return stored, Cost(cached=1)
            if (asking := self._asking.get(key)) is not None:
                score, _ = await asyncio.shield(asking)
                return score, Cost(cached=1)
        asking = asyncio.create_task(self._ask_in_time(caller, key, messages))
        self._asking[key] = asking
        asking.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(asking)

    def _forget(self, key: str, done: asyncio.Task[tuple[float, Cost]]) -> None:
        """Remove a finished request."""
        if self._asking.get(key) is done:
            del self._asking[key]
        if not done.cancelled():
            done.exception()  # The error is known, so asyncio does not log it.

    async def _kept_score(self, caller: Caller, key: str) -> float | None:
        """Return the score of a kept answer; None: there is none, or the rule has changed."""
        stored = self.store.find(key)
        if stored is None:
            return None
        try:
            return await self._read(caller, stored.text)
        except Unparsed:  # The rule has changed since.
            return None

    async def _read(self, caller: Caller, answer: str) -> float:
        """Return the score of an answer. Raises: Unparsed: it has none."""
        if not self.rubric.pattern:
            return self.rubric.score(answer)
        offered = {"pattern": self.rubric.pattern, "text": self.rubric.searched(answer)}
        try:
            reply = await caller.call(SEARCH, offered, timeout_s=SEARCH_TIMEOUT_S)
        except Ungraded as error:
            raise Unparsed(f"the search for {self.rubric.pattern!r}: {error}") from error
        return self.rubric.score(answer, matched=str(reply.value))

    async def _ask_in_time(
        self, caller: Caller, key: str, messages: list[dict[str, str]]
    ) -> tuple[float, Cost]:
        """Return a score and its cost. Raises: ServiceDown: the requests take too long."""
        cost = Cost()
        try:
            async with asyncio.timeout(self.longest_s), self._slots:
                score = await self._score(caller, key, messages, cost)
        except TimeoutError as error:
            num = counted(self.options.concurrency, "request")
            text = f"at most {num} at once is too few"
            raise self._outage(f"no score within {self.longest_s:g} s; {text}") from error
        cost.unanswered = self._num_unanswered
        self._num_unanswered = 0
        return score, cost

    async def _score(
        self, caller: Caller, key: str, messages: list[dict[str, str]], cost: Cost
    ) -> float:
        """Return a score; failed requests are repeated. Raises: ServiceDown, EnvFailure."""
        failure = ""
        temperature = self.options.temperature
        for attempt in range(self.options.retries + 1):
            is_last = attempt == self.options.retries
            try:
                answer = await self._call(self._body(messages, temperature), cost)
                if answer.is_cut:
                    answer = replace(answer, text=self.rubric.whole_part(answer.text))
                score = await self._read(caller, answer.text)
            except Unanswered as error:
                self._num_unanswered += 1
                if is_last:
                    raise self._outage(str(error)) from error
                await asyncio.sleep(max(error.wait_s, BACKOFF_S * 2**attempt))
            except Unparsed as error:
                cost.unparsed += 1
                self.store.add("unparsed")
                failure = f"{error} in {answer.text[:SHOWN_CHARS]!r}"
                if answer.is_cut:
                    limit = f"reward.{self.options.name}.max_tokens={self.options.max_tokens}"
                    failure += f", which {limit} cut off"
                temperature = max(temperature, RETRY_TEMPERATURE)
            else:
                if self.options.cache:
                    self.store.keep(key, answer)
                return score
        tries = counted(self.options.retries + 1, "try", "tries")
        raise self._failed(f"an answer has no score ({tries}): {failure}")

    async def _call(self, body: dict[str, Any], cost: Cost) -> Answer:
        """Return the answer to one request. Raises: Unanswered, EnvFailure."""
        if not self.store.add(CALLS, most=self.options.budget):
            key = f"reward.{self.options.name}.budget={self.options.budget}"
            raise self._failed(f"{key} is used up; continue the run with a larger one")
        is_charged = True
        try:
            answer, took_s = await self._endpoint.complete(body)
        except Unanswered as error:
            is_charged = error.is_charged
            raise
        except Refused as error:
            is_charged = False
            raise self._failed(str(error)) from error
        finally:
            if not is_charged:
                self.store.add(CALLS, -1)
        tokens = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
        cost.add(took_s, **tokens)
        for name, num in tokens.items():
            self.store.add(name, num)
        return answer

    async def probe(self) -> str:
        """Return why the endpoint does not answer; "" if it does.

        An answered probe counts as a request of the budget.
        """
        try:
            await self._call(self._body(PING, self.options.temperature), Cost())
        except Unanswered as error:
            return self._down_text(str(error))
        except EnvFailure:  # It answers. The next episode gets the error.
            return ""
        return ""

    def _body(self, messages: list[dict[str, str]], temperature: float) -> dict[str, Any]:
        """Return the body of a request."""
        options = self.options
        body: dict[str, Any] = {
            "model": options.model or options.name,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": options.max_tokens,
            **options.extra,
        }
        # A null of `extra` removes a field that an endpoint refuses.
        return {name: value for name, value in body.items() if value is not None}

    def _down_text(self, text: str) -> str:
        """Return the text about a judge that does not answer."""
        return f"judge {self.options.name} ({self.options.shown}) does not answer: {text}"

    def _outage(self, text: str) -> ServiceDown:
        """Return the error for a judge that does not answer, and log it."""
        logger.warning("judge does not answer name=%s reason=%s", self.options.name, text)
        return ServiceDown(self._down_text(text))

    def _failed(self, text: str) -> EnvFailure:
        """Return the error for a judge's wrong answer or a wrong request."""
        return EnvFailure(f"judge {self.options.name} ({self.options.shown}): {text}")


def probe_of(judges: Sequence[Judge]) -> Callable[[], Awaitable[str]] | None:
    """Return a probe that returns why a judge does not answer, "" if all do; None: no judges."""

    async def probe() -> str:
        reasons = await asyncio.gather(*(each.probe() for each in judges))
        return "; ".join(filter(None, reasons))

    return probe if judges else None


def read_key(options: JudgeOptions) -> str:
    """Return the key of the endpoint, "" without one.

    Raises: ConfigError: the environment variable is not set.
    """
    if options.key_env:
        return key_from(options.key_env, setting=f"reward.{options.name}.key_env")
    return os.environ.get(options.key_variable, "") if options.key_variable else ""
