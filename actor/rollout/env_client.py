"""HTTP client of the environment hub: one session per episode, with safe retries."""

import asyncio
import contextlib
import io
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from actor.formats.thoughts import FIELDS
from actor.rollout.batches import (
    CLOSE,
    OPEN,
    SESSION_PATH,
    STEP,
    ActionTooLarge,
    AnswerTooLarge,
    Batches,
    failure_of,
    field_of,
    route_of,
)
from common.errors import EnvError, EnvTimeout, HubFull, HubLost
from common.formats.calls import as_call, each_text
from common.http.sessions import open_session
from common.text import counted, json_bytes, valid_text

logger = logging.getLogger(__name__)

NUM_TRIES = 4
BACKOFF_S = 0.25  # Seconds before the first retry. The delay doubles with each try.
FULL = "the hub is full (429)"
MIN_RETRY_S = 0.05  # Shortest wait after a 429, which prevents a busy loop.
MAX_ANSWER_BYTES = 64 << 20
MAX_FACTS_CHARS = 1_000_000
MAX_AT_ONCE_BYTES = 64 << 10
OnFull = Callable[[str], None]  # Receives the hub's reason.
UNLIMITED = aiohttp.ClientTimeout(total=None)
JSON_HEADERS = {"Content-Type": "application/json"}

PROBE_S = 2.0  # Seconds for a hub to answer a probe.
STAY_S = 30.0  # Longest silence, in seconds, on a keep-alive connection.
AGAIN_S = 0.25
MAX_SIGNS = 2_000  # Number of remembered signs, about a quarter of an hour.
# Seconds without a sign after which a hub that sends two a second counts as suspended.
SILENT_S = 3.0


class LifeSigns:
    """Times at which a hub sent signs of life on the keep-alive connection. Some hubs send none."""

    def __init__(self) -> None:
        self._heard_at: deque[float] = deque(maxlen=MAX_SIGNS)

    def hear(self) -> None:
        """Record a sign of life."""
        self._heard_at.append(time.monotonic())

    def are_missing(self, *, within_s: float) -> bool:
        """Return whether the hub is suspended, or was for at least half of the last `within_s`.

        Then a step that timed out in that time is not at fault, even if the hub resumed before the
        timeout.
        """
        if not self._heard_at:
            return False
        now = time.monotonic()
        limit_s = min(SILENT_S, within_s)
        silences = pairwise(max(at, now - within_s) for at in self._heard_at)
        longest_s = max((end - start for start, end in silences), default=0.0)
        stands_still = now - self._heard_at[-1] >= limit_s
        return stands_still or longest_s >= max(limit_s, within_s / 2)


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a server answers at the hub's address within `PROBE_S`."""
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with http.get(f"{url}/healthz", timeout=timeout):
            return True
    except (aiohttp.ClientError, TimeoutError):
        return False


async def stay(
    http: aiohttp.ClientSession, url: str, owner: str, on_sign: Callable[[], object]
) -> None:
    """Hold the owner's keep-alive connection until cancelled or the hub has no such route.

    The connection closes when the process is killed, and the hub then closes the owner's sessions.

    Args:
        on_sign: called for each sign of life; the hub sends two a second.
    """
    path = f"{url}/v1/presence/{quote(owner, safe='')}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_S, sock_read=STAY_S)
    while True:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with http.get(path, timeout=timeout) as response:
                if response.status == 404:
                    return
                async for _ in response.content.iter_any():
                    on_sign()
        await asyncio.sleep(AGAIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStepResult:
    """The hub's answer to one step."""

    observation: str
    reward: float  # [0, 1]
    done: bool
    is_valid: bool  # False if the text was not an executable action.
    is_success: bool  # The episode ended solved.
    state: str = ""  # The environment's state after the step; "" if it reports none.
    # A limit of the environment, not the task itself, ended the episode.
    is_truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    facts: str = ""  # JSON object of values for the rewards over the group; "" without any.
    seat: int = 0  # The seat that moves next.
    seat_rewards: list[float] = field(default_factory=list[float])  # [] without seats.
    earlier_s: float = 0.0  # Seconds of a recorded step; 0: this call performed it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHint:
    """The information that a scripted policy may use."""

    valid_actions: list[str]
    expert_action: str | None  # None if the expert has no action.


class BearerClient:
    """A pool of HTTP connections whose requests carry a bearer token, if there is one."""

    def __init__(
        self, url: str, *, token: str | None, timeout_s: float, is_own: bool = False
    ) -> None:
        self._http = open_session(
            url,
            is_own=is_own,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()


class HubClient(BearerClient):
    """A pool of connections to one hub.

    Example:
        async with HubClient(url, token=token, timeout_s=60) as hub:
            session = await hub.open("babyai", "GoToLocal-train-3", seed=0, style="compact")
            result = await session.step("go to red ball 1")
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        owner: str = "",
        on_lost: Callable[[HubLost], None] = lambda _: None,
    ) -> None:
        """Create the client without connecting.

        Args:
            owner: its sessions live as long as its `stay`.
            on_lost: called with each failure that means that the hub is lost.
        """
        super().__init__(url, token=token, timeout_s=timeout_s, is_own=True)
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._owner = {"owner": owner} if owner else {}
        self.answers = partial(answers, self._http, self._url)
        self._signs = LifeSigns()
        self.stay = partial(stay, self._http, self._url, owner, self._signs.hear)
        self.num_in_flight = 0  # Requests without an answer yet, with their repetitions.
        self.is_lost = False  # The last request got no answer from the hub.
        self.left: list[str] = []  # Sessions that were abandoned while the hub was lost.
        self._on_lost = on_lost
        self.steps = Batches(self.request, STEP)
        self._opens = Batches(
            self.request, OPEN, alone=self._open_at_once, on_unwanted=self._close_alone
        )
        self._closes = Batches(self.request, CLOSE, alone=self._close_alone)

    async def open(
        self,
        env: str,
        item_id: str,
        *,
        seed: int,
        style: str,
        is_quick: bool = False,
        on_full: OnFull | None = None,
    ) -> "HubSession":
        """Start an episode; wait while the hub is full.

        Args:
            is_quick: batch the session's requests with those of other episodes.
            on_full: called whenever the hub has no free session.

        Raises: EnvError, EnvTimeout.
        """
        body = {"env": env, "item_id": item_id, "seed": seed, "style": style, **self._owner}
        path = OPEN.alone
        reply = await self._opens.ask(body) if is_quick else None
        if reply is None:  # A request of its own, which waits until the hub has room.
            reply = await self.request("POST", OPEN.alone, body, on_full=on_full)
        session_id = valid_text(field_of(reply, "session_id", str, path=path))
        observation = field_of(reply, "observation", str, path=path)
        session = HubSession(self, session_id, observation, is_quick=is_quick)
        session.first_state = str(reply.get("state") or "")
        session.start_score = score_of(reply, "start_score", path=path, absent=0.0)
        session.first_messages = _messages_of(reply, path=path)
        session.tools = _tools_of(reply, path=path)
        session.can_save = reply.get("can_save") is True
        session.is_repeatable = reply.get("is_repeatable") is True
        if "num_seats" in reply:
            session.num_seats = field_of(reply, "num_seats", int, path=path)
            session.first_seat = seat_of(reply, session.num_seats, path=path)
        return session

    async def _open_at_once(self, body: dict[str, Any]) -> Any:
        """Return the answer to a request of its own; None: the hub is full."""
        try:
            return await self.request("POST", OPEN.alone, body, on_full=_stop_at_full)
        except _FullNow:
            return None

    async def close(self) -> None:
        """Wait for requests in flight, then close the connections."""
        await asyncio.gather(self._opens.close(), self.steps.close(), self._closes.close())
        await super().close()

    async def close_session(self, session_id: str, *, is_quick: bool) -> None:
        """Close a session. Raises: EnvError, EnvTimeout: it did not exist, or may still be open."""
        entry = {"session_id": session_id}
        if is_quick:
            try:
                await self._closes.ask(entry)
                return
            except HubLost:
                raise
            except EnvError as error:  # An older version of the hub has no route for batches.
                logger.debug("batched close failed reason=%s", error)
        await self._close_alone(entry)

    async def close_left(self) -> None:
        """Close the sessions that were abandoned while the hub was lost, if it still has them."""
        left = self.left
        self.left = []
        for session_id in left:
            try:
                await self._close_alone({"session_id": session_id})
            except EnvError as error:
                logger.debug("close failed session=%s reason=%s", session_id, error)
                if self.is_lost:
                    return

    async def _close_alone(self, entry: dict[str, Any]) -> Any:
        await self.request("DELETE", SESSION_PATH + quote(entry["session_id"], safe=""), None)

    async def request(
        self, method: str, path: str, body: object, *, on_full: OnFull | None = None
    ) -> Any:
        """Send one request. Retry after a lost connection and, until the deadline, after a 429.

        A retry is safe: a step carries its number, and a session whose id was lost expires.

        Args:
            on_full: called at each 429.

        Raises:
            HubFull: 429 until `timeout_s` was over.
            EnvTimeout: no answer within `timeout_s`, or a 504 from the hub.
            HubLost: the hub is unreachable, was suspended, shuts down, or has no such session.
            EnvError: the hub refused the request or failed.
        """
        self.num_in_flight += 1
        try:
            return await self._request_repeatedly(method, path, body, on_full)
        finally:
            self.num_in_flight -= 1

    async def _request_repeatedly(
        self, method: str, path: str, body: object, on_full: OnFull | None
    ) -> Any:
        """Send one request until it is answered; see `request`."""
        failure = ""
        num_lost = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while num_lost < NUM_TRIES:
                    try:
                        reply = await self._try_request(method, path, body, on_full)
                    except aiohttp.ClientError as error:
                        failure = f"{type(error).__name__}: {error}"
                        num_lost += 1
                        if num_lost < NUM_TRIES:
                            await asyncio.sleep(BACKOFF_S * 2 ** (num_lost - 1))
                        continue
                    if reply is not None:
                        self.is_lost = False
                        return reply
                    failure = FULL
        except EnvTimeout:
            raise
        except TimeoutError as error:
            is_full = failure == FULL
            failure = f"no answer within {self._timeout_s:g} s; {failure}"
            is_awake = not self._signs.are_missing(within_s=self._timeout_s)
            if await self.answers() and is_awake:
                kind = HubFull if is_full else EnvTimeout
                raise kind(f"{route_of(method, path)}: {failure}") from error
        self.is_lost = True
        tries = counted(max(1, num_lost), "try", "tries")
        lost = HubLost(f"{route_of(method, path)}: {failure}, {tries}")
        self._on_lost(lost)
        raise lost

    async def _try_request(
        self, method: str, path: str, body: object, on_full: OnFull | None
    ) -> Any:
        """Return the parsed answer; None after waiting out a 429."""
        headers = None if body is None else JSON_HEADERS
        async with self._http.request(
            method,
            self._url + path,
            data=None if body is None else _payload_of(json_bytes(body)),
            headers=headers,
            timeout=UNLIMITED,  # The caller limits all tries together.
        ) as response:
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(
                        f"{route_of(method, path)}: the answer has more than"
                        f" {MAX_ANSWER_BYTES} bytes"
                    )
            if response.status == 429:
                if on_full is not None:
                    on_full(detail_of(text))
                wait_s = retry_after_s(response.headers, default_s=1.0)
                await asyncio.sleep(max(MIN_RETRY_S, wait_s))
                return None
            shown = detail_of(text)
            if failure := failure_of(method, path, response.status, shown):
                raise failure
            try:
                return (json.loads(text) if text else {}) or {}  # None is reserved for a 429.
            except (ValueError, RecursionError) as error:
                raise EnvError(
                    f"{route_of(method, path)}: the answer is not JSON: {shown}"
                ) from error


class _FullNow(Exception):
    """Ends a request at its first 429."""


def _stop_at_full(_: str) -> None:
    raise _FullNow


def _payload_of(body: bytes) -> bytes | io.BytesIO:
    """Return a body as aiohttp sends it best: a short one at once, a long one in parts."""
    return body if len(body) <= MAX_AT_ONCE_BYTES else io.BytesIO(body)


def detail_of(text: bytearray) -> str:
    """Return the reason in a hub's refusal, or its whole text."""
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return repr(bytes(text[:300]))


def score_of(reply: Any, name: str, *, path: str, absent: float | None = None) -> float:
    """Return a score of an answer, `absent` if it has none. Raises: EnvError: not in [0, 1]."""
    if absent is not None and isinstance(reply, dict) and name not in reply:
        return absent
    score = field_of(reply, name, float, int, path=path)
    if not 0.0 <= score <= 1.0:
        raise EnvError(f"{path}: the answer has {name}={score!r:.100}, which is not in [0, 1]")
    return float(score)


def seat_of(reply: Any, num_seats: int, *, path: str) -> int:
    """Return the seat that moves next. Raises: EnvError: there is no such seat."""
    seat = field_of(reply, "seat", int, path=path)
    if not 0 <= seat < num_seats:
        raise EnvError(f"{path}: the answer has seat={seat}, but there are {num_seats} seats")
    return seat


def _messages_of(reply: Any, *, path: str) -> list[dict[str, Any]]:
    """Return the messages before the first observation. Raises: EnvError: they are malformed."""
    checked: list[dict[str, Any]] = []
    for entry in reply.get("messages") or []:
        message = {name: field_of(entry, name, str, path=path) for name in ("role", "content")}
        for name in ("tool_call_id", "name", FIELDS[0]):
            if name in entry:
                message[name] = field_of(entry, name, str, path=path)
        if "tool_calls" in entry:
            calls = field_of(entry, "tool_calls", list, path=path)
            message["tool_calls"] = [_call_of(call, path=path) for call in calls]
        checked.append(each_text(message, valid_text))
    return checked


def _call_of(call: Any, *, path: str) -> dict[str, Any]:
    """Return a past call of a tool. Raises: EnvError: it is malformed."""
    function = field_of(call, "function", dict, path=path)
    name = field_of(function, "name", str, path=path)
    number = {"id": field_of(call, "id", str, path=path)} if "id" in call else {}
    return {**number, **as_call(name, field_of(function, "arguments", dict, path=path))}


def _tools_of(reply: Any, *, path: str) -> list[dict[str, Any]]:
    """Return the tools of an item; [] if it has none. Raises: EnvError: they are malformed."""
    checked: list[dict[str, Any]] = []
    for entry in reply.get("tools") or []:
        tool: dict[str, Any] = {
            "name": field_of(entry, "name", str, path=path),
            "description": field_of(entry, "description", str, path=path),
            "parameters": field_of(entry, "parameters", dict, path=path),
        }
        checked.append(each_text(tool, valid_text))
    return checked


def _metrics_of(reply: Any, *, path: str) -> dict[str, float]:
    """Return the named numbers of a step. Raises: EnvError: one is not a finite number."""
    plain: dict[str, Any] = reply.get("metrics") or {}
    metrics = {name: float(field_of(plain, name, float, int, path=path)) for name in plain}
    if wrong := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise EnvError(f"{path}: the answer has a metric {wrong[0]!r:.100} that is not finite")
    return metrics


def _facts_of(reply: Any, *, path: str) -> str:
    """Return the facts of a step as JSON. Raises: EnvError: they are too large for a message."""
    if not reply.get("facts"):
        return ""
    text = valid_text(json.dumps(field_of(reply, "facts", dict, path=path)))
    if len(text) > MAX_FACTS_CHARS:
        raise EnvError(
            f"{path}: the facts of the episode have {len(text)} characters, more than"
            f" {MAX_FACTS_CHARS}; leave out large columns of the record, or groups.reward"
        )
    return text


def retry_after_s(headers: Mapping[str, str], *, default_s: float = 0.0) -> float:
    """Return the seconds in the Retry-After header; `default_s` if it is missing or unreadable."""
    try:
        asked_s = float(headers.get("Retry-After", default_s))
    except ValueError:  # The header may hold a date.
        asked_s = default_s
    return asked_s if math.isfinite(asked_s) and asked_s >= 0 else default_s


class HubSession:
    """One episode at the hub. Not for use by two tasks at once."""

    def __init__(
        self, hub: HubClient, session_id: str, observation: str, *, is_quick: bool
    ) -> None:
        self._hub = hub
        self._session_id = session_id
        self._path = f"{SESSION_PATH}{quote(session_id, safe='')}"
        self._is_quick = is_quick
        self._seq = 0
        self.first_observation = observation
        self.first_state = ""  # "" if the environment reports no state.
        self.start_score = 0.0
        self.first_messages: list[dict[str, Any]] = []  # They precede the first observation.
        self.tools: list[dict[str, Any]] = []  # Tools of the item; []: those of its environment.
        self.num_seats = 1  # Number of players that act in turn.
        self.first_seat = 0  # The seat that moves first.
        self.can_save = False  # The environment can return its state after a step.
        self.is_repeatable = False  # Equal actions always have equal results.
        self.saves = False  # Steps request the state. Only a hub that reports `can_save` knows it.
        # State after the last step, for `load`; "" if none was requested or returned.
        self.saved = ""

    async def step(self, action: str) -> HubStepResult:
        """Execute an action. An action that is too large for the hub is invalid.

        Raises: EnvError, EnvTimeout.
        """
        self._seq += 1
        path = f"{self._path}/step"
        action = valid_text(action)
        asked = {"action": action, "seq": self._seq} | ({"save": True} if self.saves else {})
        try:
            reply = await self._ask(path, asked)
        except ActionTooLarge:
            # The action cannot reach the environment. The hub answers in its place.
            oversized = asked | {"action": "", "num_bytes": len(action.encode())}
            reply = await self._ask(path, oversized)
        self.saved = str(reply.get("saved") or "") if self.saves else ""
        reward = score_of(reply, "reward", path=path)
        done = field_of(reply, "done", bool, path=path)
        reply.setdefault("is_success", done and reward >= 1.0)  # Third-party hubs may omit it.
        reply.setdefault("is_truncated", False)  # Third-party hubs may omit it.
        return HubStepResult(
            observation=field_of(reply, "observation", str, path=path),
            reward=reward,
            done=done,
            is_valid=field_of(reply, "is_valid", bool, path=path),
            is_success=field_of(reply, "is_success", bool, path=path),
            state=str(reply.get("state") or ""),  # Third-party hubs may omit it.
            is_truncated=done and field_of(reply, "is_truncated", bool, path=path),
            metrics=_metrics_of(reply, path=path),
            facts=_facts_of(reply, path=path),
            **self._seats_of(reply, done=done, path=path),
        )

    def _seats_of(self, reply: Any, *, done: bool, path: str) -> dict[str, Any]:
        """Return the next seat and the reward of each seat; {} if the session has one seat."""
        if self.num_seats == 1:
            return {}
        rewards = field_of(reply, "seat_rewards", list, path=path)
        named = {f"seat_rewards[{seat}]": reward for seat, reward in enumerate(rewards)}
        if len(named) != self.num_seats:
            raise EnvError(f"{path}: {len(named)} seat_rewards for {self.num_seats} seats")
        scores = [score_of(named, name, path=path) for name in named]
        seat = 0 if done else seat_of(reply, self.num_seats, path=path)
        return {"seat": seat, "seat_rewards": scores}

    async def _ask(self, path: str, asked: dict[str, Any]) -> Any:
        """Send a request about this session, in a batch with others if the hub is quick."""
        if self._is_quick:
            return await self._hub.steps.ask({"session_id": self._session_id, **asked})
        return await self._hub.request("POST", path, asked)

    async def load(self, saved: str) -> None:
        """Bring a session without a step into a saved state of the same item and seed.

        Raises: EnvError, EnvTimeout: the state is damaged, or the environment cannot load it.
        """
        await self._hub.request("POST", f"{self._path}/load", {"saved": saved})

    async def hint(self) -> ExpertHint:
        """Return the information that a scripted policy may use. Raises: EnvError, EnvTimeout."""
        path = f"{self._path}/hint"
        reply = await self._hub.request("GET", path, None)
        actions = [
            valid_text(str(action)) for action in field_of(reply, "valid_actions", list, path=path)
        ]
        expert = field_of(reply, "expert_action", str, type(None), path=path)
        return ExpertHint(valid_actions=actions, expert_action=expert and valid_text(expert))

    async def picture(self) -> Any:
        """Return a picture of the state for display, see `Env`. Raises: EnvError, EnvTimeout."""
        reply = await self._hub.request("GET", f"{self._path}/picture", None)
        return reply.get("picture") if isinstance(reply, dict) else None

    async def close(self) -> None:
        """Close the session. A missing session or an unreachable hub is not an error."""
        if self._hub.is_lost:
            self._hub.left.append(self._session_id)
            return
        try:
            await self._hub.close_session(self._session_id, is_quick=self._is_quick)
        except EnvError as error:
            logger.debug("close failed path=%s reason=%s", self._path, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """The environments of a hub, with their texts in one style."""

    hub: HubClient
    style: str  # Name of the style of observations.
    instructions: dict[str, dict[str, str]]  # environment -> style -> text
    answers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    # environment -> its tools
    tools: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    quick: frozenset[str] = frozenset()  # Environments whose steps take negligible time.
    # environment -> maximum number of its sessions; older hubs report none
    num_places: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    async def of(cls, hub: HubClient, *, style: str) -> "Environments":
        """Fetch the hub's catalogue of environments. Raises: EnvError, EnvTimeout."""
        path = "/v1/envs"
        catalogue = await hub.request("GET", path, None)
        if not isinstance(catalogue, dict):
            shown = f"{catalogue!r:.100}"
            raise EnvError(f"{path}: the answer is not an object of environments: {shown}")
        texts = {
            name: {k: str(v) for k, v in field_of(entry, "instruction", dict, path=path).items()}
            for name, entry in catalogue.items()
        }
        answers = {
            name: {k: str(v) for k, v in (entry.get("acknowledgement") or {}).items()}
            for name, entry in catalogue.items()
        }
        tools = {name: list(entry.get("tools") or []) for name, entry in catalogue.items()}
        quick = frozenset(name for name, entry in catalogue.items() if entry.get("is_quick"))
        num_places = {
            name: field_of(entry, "num_places", int, path=path)
            for name, entry in catalogue.items()
            if "num_places" in entry
        }
        return cls(
            hub=hub,
            style=style,
            quick=quick,
            instructions=texts,
            answers=answers,
            tools=tools,
            num_places=num_places,
        )

    def instruction(self, env: str) -> str:
        """Return the text before the first observation; "" if there is none."""
        return self.instructions.get(env, {}).get(self.style, "")

    def acknowledgement(self, env: str) -> str:
        """Return the agent's fixed answer to the instruction; "" if both texts are one message."""
        return self.answers.get(env, {}).get(self.style, "")

    def opponent_texts(self, env: str) -> dict[str, str]:
        """Return the instruction of each style; {} if observations have AgentGym's wording."""
        return {} if self.style == "agentgym" else self.instructions.get(env, {})

    async def open(
        self, env: str, item_id: str, *, seed: int, on_full: OnFull | None = None
    ) -> HubSession:
        """Start an episode; see `HubClient.open`. Raises: EnvError, EnvTimeout."""
        return await self.hub.open(
            env, item_id, seed=seed, style=self.style, is_quick=env in self.quick, on_full=on_full
        )
