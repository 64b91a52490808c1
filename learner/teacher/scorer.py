"""The component that scores complete groups with the teacher, between intake and batch."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillWaiting
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.config.algorithm import TeacherSection
from common.config.run_config import RunConfig
from common.errors import ConfigError, LongstrideError
from common.http.model_endpoint import ModelEndpoint, Refused, RequestCost, Unanswered, key_from
from common.segments import as_rows
from common.store.run_dir import RunDir
from common.wire.messages import Trajectory
from learner.teacher.scores import (
    KEY_VARIABLE,
    TEACHER,
    TeacherScores,
    empty_scores,
    joined_scores,
    read_scores,
)

MAX_REPLY_BYTES = 1 << 30  # A long episode with many tokens at each position.


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEndpoint(ModelEndpoint):
    """An endpoint with the routes of vLLM's server."""

    model: str  # "": the endpoint has one model only.
    section: str = "algorithm.teacher"
    max_reply_bytes: int = MAX_REPLY_BYTES

    async def score(
        self, token_ids: np.ndarray, positions: np.ndarray, *, num_top: int
    ) -> tuple[TeacherScores, float]:
        """Return the scores of a sequence, and the seconds of the request.

        Raises: Unanswered, Refused.
        """
        reply, took_s = await self.post(
            "/v1/completions",
            {
                "prompt": token_ids.tolist(),
                "prompt_logprobs": num_top,
                "max_tokens": 1,
                "temperature": 0,
            },
        )
        return read_scores(reply, token_ids, positions, num_top=num_top), took_s

    async def tokenize(self, text: str) -> dict[str, Any]:
        """Return the answer of the route /tokenize. Raises: Unanswered, Refused."""
        return (await self.post("/tokenize", {"prompt": text, "add_special_tokens": False}))[0]

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises: Unanswered, Refused."""
        reply, _ = await self.post("/detokenize", {"tokens": token_ids})
        return str(reply.get("prompt", ""))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the answer of a route, and its seconds. Raises: Unanswered, Refused."""
        named = {"model": self.model} if self.model else {}
        return await self.send(f"{self.base_url().removesuffix('/v1')}{path}", {**named, **body})


# Texts of many kinds: words, code, digits, spaces, and letters of several scripts.
PROBES = (
    "The agent goes north, picks up the red key and opens the door.",
    "def f(x):\n\treturn {'a': [1, 22, 333.5], \"b\": x ** 2}  # 100 %",
    "  two spaces,\n\n\nthree lines; naïve Übergröße, 東京, Москва, 🙂",
)
# Tokens in one request that searches for the end of the teacher's vocabulary.
SEARCHED = 1 << 20
NEIGHBOURS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyCheck:
    """The tokenizer that a teacher must share, and the context that it needs."""

    tokenizer: Any
    context: int  # Tokens of the longest episode.
    name: str  # "algorithm.teacher.path=..." or "algorithm.teacher.url=...".

    async def run(self, endpoint: TeacherEndpoint) -> None:
        """Ask the endpoint for the ids of texts, the size of its vocabulary and its context.

        Raises:
            ConfigError: the teacher has another tokenizer, or a context that is too short.
            Unanswered, Refused: as `TeacherEndpoint.post`.
        """
        own_size = len(self.tokenizer)
        reply: dict[str, Any] = {}
        for text in PROBES:
            reply = await endpoint.tokenize(text)
            by_teacher = reply.get("tokens")
            by_policy = self.tokenizer.encode(text, add_special_tokens=False)
            if by_teacher != by_policy:
                size = await self._size(endpoint, reply)
                raise ConfigError(
                    f"{self.name}: the teacher has another tokenizer than the policy. It encodes"
                    f" {text[:20]!r}... as {by_teacher!s:.60}, the policy as {by_policy!s:.60}. The"
                    f" teacher's vocabulary has {size} tokens, the policy's {own_size}. Choose a"
                    " teacher of the policy's family"
                )
        size = await self._size(endpoint, reply)
        if size != own_size:
            raise ConfigError(
                f"{self.name}: the teacher's vocabulary has {size} tokens, and the policy's has"
                f" {own_size}. Choose a teacher with the policy's tokenizer"
            )
        context = int(reply.get("max_model_len") or 0)
        if 0 < context <= self.context:
            raise ConfigError(
                f"{self.name}: the teacher's context has {context} tokens. Scoring an episode of"
                f" actor.max_model_len={self.context} needs one more, {self.context + 1}. Lower"
                " actor.max_model_len, or raise the teacher's max_model_len"
            )

    async def _size(self, endpoint: TeacherEndpoint, reply: dict[str, Any]) -> int:
        """Return the size of the teacher's vocabulary.

        Our own endpoint reports it. vLLM's server does not: the search asks for the text of tokens
        beyond an id, which is empty beyond the end.
        """
        if isinstance(size := reply.get("vocab_size"), int):
            return size
        low = 0
        high = SEARCHED
        policy_size = len(self.tokenizer)
        if await self._ends_at(endpoint, policy_size):
            return policy_size
        while low < high:
            middle = (low + high) // 2
            if await self._has_text(endpoint, middle):
                low = middle + 1
            else:
                high = middle
        return low

    async def _ends_at(self, endpoint: TeacherEndpoint, size: int) -> bool:
        return await self._has_text(endpoint, size - 1) and not await self._has_text(endpoint, size)

    async def _has_text(self, endpoint: TeacherEndpoint, start: int) -> bool:
        """Return whether a token from an id on exists; a few may be empty."""
        try:
            return bool(await endpoint.detokenize([*range(start, start + NEIGHBOURS)]))
        except Refused:  # The server refuses an id beyond its vocabulary.
            return False


logger = logging.getLogger(__name__)

PROBE_S = 2.0  # Seconds between two probes of a teacher that is down.
WARN_EVERY_S = 60.0  # Seconds between two warnings about it.
POLL_S = 0.1
STOP_S = 5.0


class TeacherScorer(threading.Thread):
    """Scores trajectories in its own thread.

    Consumes: trajectories of complete groups, by `begin`.
    Waits for: the teacher's endpoint, without a limit. While it is down, all trajectories wait and
        one probe every `PROBE_S` asks for it.
    Unblocked by: `stop`. A refusal ends the thread; `check` raises it in the main thread.

    Example (concurrency 2): begin([a, b, c]) sends a and b; c follows when one is answered. The
    teacher ends: b and c wait. It is back: the probe is answered, b and c are sent again.
    """

    def __init__(
        self,
        endpoint: TeacherEndpoint,
        vocabulary: VocabularyCheck,
        cfg: TeacherSection,
        *,
        probe_s: float = PROBE_S,
    ) -> None:
        super().__init__(name="teacher", daemon=True)
        self._endpoint = endpoint
        self._vocabulary = vocabulary
        self._cfg = cfg
        self._probe_s = probe_s
        self._loop = asyncio.new_event_loop()
        self._is_up = asyncio.Event()
        self._slots = asyncio.Semaphore(cfg.concurrency)
        self._stop_requested = asyncio.Event()
        self._lock = threading.Lock()  # Guards the counts below.
        self._num_waiting = 0
        self._cost = RequestCost()
        self._down_s = 0.0
        self._has_answered = False
        self._failure: LongstrideError | None = None
        self.problem = "it has not answered yet"  # Reason for which it is down; "": it answers.

    # --- for any thread -------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Trajectories that have no scores yet."""
        with self._lock:
            return self._num_waiting

    @property
    def has_room(self) -> bool:
        """Whether fewer than `algorithm.teacher.max_waiting` trajectories wait."""
        return self.num_waiting < self._cfg.max_waiting

    @property
    def waiting_for(self) -> str:
        """The teacher and the reason if trajectories wait for one that is down, else ""."""
        return f"teacher: {self.problem}" if self.problem and self.num_waiting else ""

    def check(self) -> None:
        """Raise the error that ended this thread. Raises: ConfigError, Refused."""
        if self._failure is not None:
            raise self._failure

    def begin(self, members: Sequence[Trajectory]) -> Future[list[TeacherScores]]:
        """Return the pending scores of trajectories, in order."""
        with self._lock:
            self._num_waiting += len(members)
        return asyncio.run_coroutine_threadsafe(self._score_all(members), self._loop)

    def score(
        self, members: Sequence[Trajectory], *, check: Callable[[], object]
    ) -> list[TeacherScores]:
        """Return the scores of trajectories; wait as long as the teacher is down.

        Args:
            check: called several times a second; it ends the wait by raising.

        Raises: ConfigError, Refused: the teacher cannot score them.
        """
        pending = self.begin(members)
        while True:
            self.check()
            check()
            try:
                return pending.result(timeout=POLL_S)
            except StillWaiting:
                if pending.done():
                    raise

    def drain_metrics(self) -> dict[str, float]:
        """Return metrics of the requests since the last call."""
        with self._lock:
            cost = self._cost
            metrics = {
                "teacher/waiting": float(self._num_waiting),
                "teacher/tokens": float(cost.prompt_tokens),
                "teacher/down_s": self._down_s,
            }
            self._cost = RequestCost()
            self._down_s = 0.0
        if cost.calls:
            metrics["teacher/latency"] = cost.seconds / cost.calls
        return metrics

    def stop(self) -> None:
        """End the thread. Trajectories without scores stay in the journal."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._stop_requested.set)
            self.join(timeout=STOP_S)

    # --- this thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.run_until_complete(self._cancel_all())
            self._loop.close()

    async def _serve(self) -> None:
        reviving = asyncio.create_task(self._revive())
        await self._stop_requested.wait()
        reviving.cancel()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _revive(self) -> None:
        """Probe the teacher until it answers, then let the requests continue."""
        began = time.monotonic()
        # The first start of an engine takes long; only a longer one is worth a warning.
        warned = began - WARN_EVERY_S * self._has_answered
        while True:
            try:
                await self._vocabulary.run(self._endpoint)
                break
            except Unanswered as error:
                self.problem = f"{self._vocabulary.name} is down: {error}"
            except LongstrideError as error:
                self._fail(error)
                return
            if time.monotonic() - warned >= WARN_EVERY_S:
                warned = time.monotonic()
                waited_s = warned - began
                logger.warning(
                    "%s; training waits waiting=%d waited_s=%.0f",
                    self.problem,
                    self.num_waiting,
                    waited_s,
                )
            await asyncio.sleep(self._probe_s)
        took_s = time.monotonic() - began
        with self._lock:
            self._down_s += took_s
        logger.info("teacher answers %s waited_s=%.1f", self._vocabulary.name, took_s)
        self.problem = ""
        self._has_answered = True
        self._is_up.set()

    def _note_down(self, error: Unanswered) -> None:
        """Stop all requests until a probe is answered."""
        if not self._is_up.is_set():
            return
        self._is_up.clear()
        self.problem = f"{self._vocabulary.name} is down: {error}"
        self._reviving = asyncio.get_running_loop().create_task(self._revive())

    def _fail(self, error: LongstrideError) -> None:
        kind = type(error)
        name = self._vocabulary.name
        text = str(error)
        self._failure = error if text.startswith(name) else kind(f"{name}: {text}")
        logger.error("%s", self._failure)

    async def _score_all(self, members: Sequence[Trajectory]) -> list[TeacherScores]:
        try:
            return list(await asyncio.gather(*(self._score_one(each) for each in members)))
        except LongstrideError as error:
            self._fail(error)
            raise

    async def _score_one(self, trajectory: Trajectory) -> TeacherScores:
        parts: list[TeacherScores] = []
        for row in as_rows(trajectory):
            positions = np.flatnonzero(row.loss_mask)
            if len(positions):
                # Later tokens have no effect on the scores.
                parts.append(await self._ask(row.token_ids[: positions[-1] + 1], positions))
        with self._lock:
            self._num_waiting -= 1
        return joined_scores(parts) if parts else empty_scores(self._cfg.num_top)

    async def _ask(self, token_ids: np.ndarray, positions: np.ndarray) -> TeacherScores:
        """Return the scores of a sequence; ask again until the teacher answers."""
        while True:
            await self._is_up.wait()
            async with self._slots:
                if not self._is_up.is_set():
                    continue
                try:
                    scores, took_s = await self._endpoint.score(
                        token_ids, positions, num_top=self._cfg.num_top
                    )
                except Unanswered as error:
                    self._note_down(error)
                    continue
            with self._lock:
                self._cost.add(took_s, prompt_tokens=len(token_ids))
            return scores


def start_teacher(cfg: RunConfig, run_dir: RunDir, tokenizer: Any) -> TeacherScorer | None:
    """Return the running scorer of `algorithm.teacher`; None without a teacher.

    Raises: ConfigError: the environment lacks the key of the endpoint.
    """
    teacher = cfg.algorithm.teacher
    if not teacher.is_on:
        return None
    is_own = bool(teacher.path)
    key = os.environ.get(KEY_VARIABLE, "") if is_own else ""
    if is_own and not key:
        raise ConfigError(
            f"algorithm.teacher.path={teacher.path}: only `python run.py train` starts its engine."
            " For a learner that is started alone, serve the teacher with `python run.py serve` and"
            " set algorithm.teacher.url"
        )
    if not is_own:
        key = key_from(teacher.key_env, setting="algorithm.teacher.key_env")
    endpoint = TeacherEndpoint(
        find_url=(lambda: run_dir.find_address(TEACHER) or "") if is_own else lambda: teacher.url,
        key=key,
        model="" if is_own else teacher.model,
        timeout_s=teacher.timeout_s,
        is_own=is_own,
    )
    name = f"algorithm.teacher.{f'path={teacher.path}' if is_own else f'url={teacher.url}'}"
    vocabulary = VocabularyCheck(tokenizer=tokenizer, context=cfg.actor.max_model_len, name=name)
    scorer = TeacherScorer(endpoint, vocabulary, teacher)
    scorer.start()
    return scorer
