"""An AgentGym server as an environment: `env.url=http://... env.dialect=<name>`.

The rules of each AgentGym client extract the action from a model's text.
"""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import aiohttp

from common.config.env import RemoteOptions
from common.errors import ConfigError
from common.http.proxies import BY_PROXY, ProxyFailed, route_note, without_login
from common.http.sessions import open_session
from common.text import json_bytes, known_hint, valid_text
from envhub.agentgym.dialects import (
    ALFWORLD,
    BABYAI,
    DIALECTS,
    MAZE,
    SCIWORLD,
    WEBARENA,
    WORDLE,
    Dialect,
    Extraction,
    Faults,
)
from envhub.agentgym.item_lists import indices_of
from envhub.agentgym.replies import RESET_FAILED
from envhub.conversations import CONVERSATIONS, begun
from envhub.env import (
    EnvFailure,
    EnvSpec,
    Isolation,
    StepResult,
    Style,
    SubsetSpec,
    action_text,
    parse_item,
)
from envhub.interop.remote_episode import RemoteEpisode
from envhub.web.actions import FENCED, NO_FENCE

logger = logging.getLogger(__name__)

# Some servers create instances one after another, each within many seconds.
CREATE_TIMEOUT_S = 300.0
MAX_SHOWN_CHARS = 200
NO_ROUTE = (404, 405)
JSON_HEADERS = {"Content-Type": "application/json"}


class RemoteFailure(EnvFailure):
    """The server failed; the text names it. `status` is its HTTP status; None: no answer."""

    def __init__(self, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_of_action(self) -> bool:
        """Whether the server refuses the action of a step: too large, or not decodable."""
        return self.status == 413 or (self.status == 422 and '"action"' in str(self))


@dataclass(slots=True, eq=False)
class RemoteInstance:
    """An instance on the server while an episode uses it.

    `is_lost`: the server assigned its number to another client, as a restarted server does.
    """

    number: int
    is_lost: bool = False


class AgentGymConnection:
    """Requests to one server. No request is repeated: a step may have run even without an answer.

    If a server cannot close instances, or creates them slowly, instances are kept after an episode
    and reused. Thus there are never more instances than concurrent episodes.

    Example: a server takes 20 s for each instance and creates one at a time. Of four episodes with
    a reset limit of 60 s, the last one gives up. Its instance is ready after 80 s and is used by
    the next episode.
    """

    def __init__(self, dialect: Dialect, options: RemoteOptions) -> None:
        self.dialect = dialect
        self._url = options.url.rstrip("/")
        self._timeout_s = options.timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._kept: list[int] = []
        self._late: list[asyncio.Task[int]] = []  # Pending creates whose episodes have given up.
        self._used: dict[int, RemoteInstance] = {}
        self._places = asyncio.Semaphore(max_sessions(dialect, options))
        self._makers = asyncio.Semaphore(1 if dialect.halts_to_create else options.max_sessions)
        self._can_close = dialect.has_close

    async def take(self, *, is_fresh: bool = False) -> tuple[RemoteInstance, bool]:
        """Return an unused instance, and whether it is an old one; never an old one if `is_fresh`.

        Waits while the maximum number of instances is in use.

        Raises: RemoteFailure: the server creates none.
        """
        await self._places.acquire()
        with contextlib.ExitStack() as undo:
            undo.callback(self._places.release)
            is_kept = bool(self._kept) and not is_fresh
            is_old = is_kept or bool(self._late)
            number = self._kept.pop() if is_kept else await self._new_number()
            undo.pop_all()
        instance = self._used[number] = RemoteInstance(number)
        return instance, is_old

    async def give_back(self, instance: RemoteInstance, *, is_sound: bool) -> None:
        """End the use of an instance; a failed instance is not reused."""
        self._places.release()
        if instance.is_lost:
            return
        del self._used[instance.number]
        is_kept = self.dialect.is_kept
        if self._can_close and not (is_sound and is_kept):
            await self._close(instance.number)
            is_kept |= not self._can_close
        if is_sound and (is_kept or not self._can_close):
            self._kept.append(instance.number)

    async def is_at_fault(self, instance: RemoteInstance) -> bool:
        """Return whether the instance caused a failed reset; otherwise the item caused it.

        A closable instance is always replaced. For other instances the server is queried: after a
        restart it has no record of its earlier instances.
        """
        if self._can_close:
            return True
        try:
            await self.get("observation", instance.number)
        except RemoteFailure as error:
            return "has finished" not in str(error)
        return False

    async def post(
        self, verb: str, instance: RemoteInstance, fields: Mapping[str, object]
    ) -> object:
        """Return the JSON of a POST for an instance. Raises RemoteFailure."""
        if instance.is_lost:
            raise self.failure(f"instance {instance.number} is lost; the server was restarted")
        body = dict(fields) | {self.dialect.instance_key: instance.number}
        return await self._request("POST", verb, body)

    async def get(self, verb: str, number: int) -> object:
        """Return the JSON of a GET for an instance. Raises RemoteFailure."""
        return await self._request("GET", f"{verb}?{self.dialect.instance_key}={number}", None)

    async def stop(self) -> None:
        """Close the kept instances, if the server supports it, and the connections."""
        instances = self._kept
        self._kept = []
        late = self._late
        self._late = []
        for task in late:
            task.cancel()
        try:
            made = await asyncio.gather(*late, return_exceptions=True)
            instances += [number for number in made if isinstance(number, int)]
            if self._can_close:
                await asyncio.gather(*(self._close(number) for number in instances))
        finally:  # The deadline of a stop cancels the requests.
            if self._session is not None:
                await self._session.close()
                self._session = None

    def failure(self, text: str, *, status: int | None = None) -> RemoteFailure:
        """Return the error of this server, with its address."""
        where = f"AgentGym server {self.dialect.name} at {without_login(self._url)}"
        return RemoteFailure(f"{where}: {text}", status=status)

    async def _new_number(self) -> int:
        """Return the number of an instance that is not in use here."""
        for _ in range(len(self._used) + 1):
            number = await self._late_or_created()
            if number in self._kept:
                self._kept.remove(number)
            if number not in self._used:
                return number
            if not self.dialect.reuses_numbers:
                self._used.pop(number).is_lost = True
                return number
        raise self.failure("the server returns only instances that are in use")

    async def _late_or_created(self) -> int:
        """Return the number of a new instance; use one whose request was cancelled, if any."""
        self._late = [task for task in self._late if not _has_failed(task)]
        task = self._late.pop(0) if self._late else asyncio.create_task(self._create())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._late.append(task)
            raise

    async def _create(self) -> int:
        """Create an instance at the server; return its number. Raises: RemoteFailure."""
        body = self.dialect.create_body
        json_body: dict[str, object] | None = None if body is None else dict(body)
        timeout_s = max(self._timeout_s, CREATE_TIMEOUT_S)
        async with self._makers:
            reply = await self._request("POST", "create", json_body, timeout_s=timeout_s)
        number = reply
        if isinstance(reply, dict):
            number = reply.get(self.dialect.instance_key)
        if not isinstance(number, int):
            raise self.failure(f"the answer to POST create has no instance number: {_shown(reply)}")
        return number

    async def _close(self, number: int) -> None:
        """Close an instance at the server. A failure is only logged."""
        body: dict[str, object] = {self.dialect.instance_key: number}
        try:
            await self._request("POST", "close", body, timeout_s=self.dialect.close_timeout_s)
        # The episode is over, so the failure affects only the server.
        except RemoteFailure as error:
            self._can_close &= error.status not in NO_ROUTE
            logger.warning("instance not closed number=%d reason=%s", number, error)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None,
        *,
        timeout_s: float | None = None,
    ) -> object:
        """Return the JSON of one request. Raises: RemoteFailure."""
        verb = f"{method} {path.partition('?')[0]}"
        limit_s = timeout_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._client().request(
                method,
                f"{self._url}/{path}",
                data=None if body is None else io.BytesIO(json_bytes(body)),
                headers=None if body is None else JSON_HEADERS,
                timeout=timeout,
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise self.failure(f"{verb}: no answer within {limit_s:g} s") from error
        except ProxyFailed as error:
            raise self.failure(f"{verb} failed: {error}") from error
        except (aiohttp.ClientError, UnicodeError) as error:
            why = f"{type(error).__name__}: {error}{route_note(self._url)}"
            raise self.failure(f"{verb} failed: {why}") from error
        if response.status != 200:
            note = route_note(self._url) if response.status in BY_PROXY else ""
            shown = f"{response.status}{note}: {text[:MAX_SHOWN_CHARS]}"
            raise self.failure(f"{verb} answered {shown}", status=response.status)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.failure(
                f"{verb}: the answer is not JSON: {text[:MAX_SHOWN_CHARS]}"
            ) from error
        has_error_key = self.dialect.faults is Faults.ERROR_KEY
        if has_error_key and isinstance(reply, dict) and "error" in reply:
            raise self.failure(f"{verb} answered the error {_shown(reply['error'])}")
        return reply

    def _client(self) -> aiohttp.ClientSession:
        """Return the session of HTTP connections, made at the first call."""
        if self._session is None:
            # One connection per request, as in AgentGym's clients: after an exception the servers
            # close a connection silently, and the next request on it would be lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = open_session(self._url, connector=connector)
        return self._session


def max_sessions(dialect: Dialect, options: RemoteOptions) -> int:
    """Return the limit of sessions: the option, or a smaller one of the server."""
    return min(options.max_sessions, dialect.max_instances or options.max_sessions)


def _has_failed(task: asyncio.Task[int]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _shown(reply: object) -> str:
    """Return a reply as short text."""
    return json.dumps(reply)[:MAX_SHOWN_CHARS]


MARK = "Action:"
END_OF_TEXT = "</s>"
SEVERAL_ACTIONS = "Error: Only one 'Action' is allowed per response. Please adjust your response."
ACTION_LINE = re.compile(r"Action:\s*([^\n]*)")
NOT_PLAIN = re.compile(r"[^A-Za-z0-9, ]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """The action to send, or the message for the agent if no action is sent."""

    action: str = ""
    complaint: str = ""


def extract(dialect: Dialect, text: str, style: Style) -> Extracted:
    """Return the action in `text`.

    In AgentGym's style, a text without the expected marks gives the action that AgentGym's client
    would send, often "". In the compact style, such a text is itself the action.
    """
    if dialect.extraction in (Extraction.LAST_ACTION, Extraction.FIRST_ACTION):
        text = text.removesuffix(END_OF_TEXT)  # The other clients do not remove it.
    is_bare = style is Style.COMPACT and MARK not in text and "```" not in text
    match dialect.extraction:
        case Extraction.ONE_ACTION:
            return _one_action(text, is_bare=is_bare)
        case Extraction.LAST_ACTION:
            return Extracted(action=_last_action(text, is_bare=is_bare))
        case Extraction.FIRST_ACTION:
            parts = text.split(MARK)
            return Extracted(action=parts[min(1, len(parts) - 1)].strip())
        case Extraction.SQL_BLOCK:
            return Extracted(action=text.rpartition("```sql")[2].partition("```")[0].strip())
        case Extraction.FENCED:
            if is_bare:
                return Extracted(action=f"```{text.strip()}```")
            is_fenced = FENCED.search(text) is not None
            return Extracted(action=text) if is_fenced else Extracted(complaint=NO_FENCE)
        case Extraction.WHOLE | Extraction.TOOL:
            return Extracted(action=text)


def _one_action(text: str, *, is_bare: bool) -> Extracted:
    """Return the only action of a text, in plain letters."""
    lines = [" ".join(text.split())] if is_bare else ACTION_LINE.findall(text)
    if len(lines) > 1:
        return Extracted(complaint=SEVERAL_ACTIONS)
    plain = NOT_PLAIN.sub("", lines[0]) if lines else ""
    return Extracted(action=" ".join(plain.split()))


def _last_action(text: str, *, is_bare: bool) -> str:
    """Return the last action of a text, "" for none."""
    if MARK in text:
        return action_text(text)
    is_action = is_bare or "search[" in text or "click[" in text
    return text.strip() if is_action else ""


T = TypeVar("T")

SUBSET = "all"
URL = re.compile(r"https?://[^/\s]+(/\S*)?")
OFFERED = re.compile(r"^Available actions: (\[.*\])\s*$", re.MULTILINE)
# BabyAI's prompt uses "pick up", its server "pickup".
PICK_UP = re.compile(r"pick up\b", re.IGNORECASE)


class RemoteEnv(RemoteEpisode):
    """One episode on an AgentGym server; `numbers` are its data indices there, by split."""

    def __init__(
        self,
        connection: AgentGymConnection,
        numbers: Mapping[str, Sequence[int]],
        subset: SubsetSpec,
        style: Style,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._dialect = connection.dialect
        self._numbers = numbers
        self._subset = subset
        self._style = style
        self._timeout_s = timeout_s
        self._instance: RemoteInstance | None = None
        self._is_sound = False  # No call is running, and no call has failed.
        self._offered: list[str] = []

    async def reset(self, item_id: str, seed: int) -> str:
        """Start an item; `seed` is unused, since the server's data alone determines the task.

        Raises: UnknownItem, EnvFailure.
        """
        item = parse_item(item_id, {SUBSET: self._subset})
        self._first = self._observation = await self._begin(self._numbers[item.split][item.index])
        self._is_sound = True
        return self._first

    async def step(self, action: str) -> StepResult:
        """Send the action that AgentGym's client would extract from the text.

        Raises: EnvFailure: the server failed; the action may have been performed.
        """
        if self._is_done or not self._is_sound:
            raise RuntimeError("step before reset, or after the episode has ended")
        extracted = extract(self._dialect, action, self._style)
        if extracted.complaint:
            return self._result(extracted.complaint, is_valid=False)
        sent = extracted.action
        if self._dialect is BABYAI:
            sent = PICK_UP.sub("pickup", sent, count=1)
        assert self._instance is not None
        self._is_sound = False
        async with self._limit("a step"):
            try:
                fields = {"action": valid_text(sent)}
                reply = await self._connection.post("step", self._instance, fields)
            except RemoteFailure as error:
                if not error.is_of_action:
                    raise
                self._is_sound = True
                return self._result(f"The server does not take the action: {error}", is_valid=False)
            await self._check_sound(reply, self._instance)
        result = self._read(reply, sent)
        self._is_sound = True
        return result

    async def valid_actions(self) -> list[str]:
        """Return the actions offered in the last reply; [] if the server does not list actions."""
        return list(self._dialect.moves or self._offered) if not self._is_done else []

    async def close(self) -> None:
        instance = self._instance
        self._instance = None
        if instance is not None:
            await self._connection.give_back(instance, is_sound=self._is_sound)

    async def _begin(self, index: int) -> str:
        """Reset an instance; an old one that the server no longer has is replaced once."""
        instance, is_old = await self._borrow_instance()
        try:
            return await self._reset(instance, index)
        except RemoteFailure:
            if not await self._connection.is_at_fault(instance):
                # The instance remains usable for other items.
                self._is_sound = self._is_done = True
                raise
            if not is_old:
                raise
        await self.close()
        instance, _ = await self._borrow_instance(is_fresh=True)
        return await self._reset(instance, index)

    async def _borrow_instance(self, *, is_fresh: bool = False) -> tuple[RemoteInstance, bool]:
        """Borrow an instance for this episode, within the timeout."""
        async with self._limit("the wait for an instance"):
            self._instance, is_old = await self._connection.take(is_fresh=is_fresh)
        return self._instance, is_old

    async def _reset(self, instance: RemoteInstance, index: int) -> str:
        """Reset an instance to an item within the timeout; return the first observation."""
        async with self._limit(f"the reset of item {index}"):
            return await self._first_observation(instance, index)

    async def _first_observation(self, instance: RemoteInstance, index: int) -> str:
        """Reset, and return the first observation as AgentGym's client composes it."""
        dialect = self._dialect
        number = instance.number
        fields = {dialect.item_key: index} | dict(dialect.reset_extra)
        reply = await self._connection.post("reset", instance, fields)
        if dialect is WEBARENA and self._field(reply, "observation", str) == RESET_FAILED:
            raise self._connection.failure(f"cannot reset item {index}")
        if dialect.is_first_by_get:
            return self._text(await self._connection.get("observation", number), "GET observation")
        if dialect is WORDLE:
            words = await self._connection.get("filtered_vocab", number)
            listed = "\n".join(self._texts(words, "GET filtered_vocab"))
            if self._style is Style.COMPACT:
                return f"The vocabulary:\n{listed}"
            return CONVERSATIONS["wordle"].first_observation(listed)
        first = self._field(reply, "observation", str)
        self._offered = self._offered_actions(reply, first)
        if dialect is SCIWORLD:
            return f"{self._field(reply, 'task_description', str)}\n{first}"
        if dialect is ALFWORLD:
            return f"{first}\nAVAILABLE ACTIONS: {','.join(self._offered)}"
        if dialect is MAZE and self._style is Style.AGENTGYM:
            return CONVERSATIONS["maze"].first_observation(first)
        return first

    async def _check_sound(self, reply: object, instance: RemoteInstance) -> None:
        """Raise RemoteFailure if a step was answered with an error that the action did not cause.

        The server answers both an unreadable action and a lost browser with the text of an
        exception. In the second case it no longer has an observation.
        """
        dialect = self._dialect
        observation = self._field(reply, dialect.observation_key, str)
        is_known = observation.startswith((dialect.sound_mark, *dialect.invalid_marks))
        if is_known or self._field(reply, dialect.done_key, bool):
            return
        try:
            await self._connection.get("observation", instance.number)
        except RemoteFailure as error:
            raise self._connection.failure(
                f"the instance is lost after the answer {observation[:200]!r}"
            ) from error

    def _read(self, reply: object, sent: str) -> StepResult:
        """Return a reply to a step as its result."""
        dialect = self._dialect
        observation = self._field(reply, dialect.observation_key, str)
        is_done = self._field(reply, dialect.done_key, bool)
        is_valid = not observation.startswith(dialect.invalid_marks or ("\0",))
        value = self._score(reply)
        if dialect.moves:
            is_valid = sent in dialect.moves
        # Its reward states whether the action was executed.
        if dialect is WEBARENA and not is_done:
            is_valid = value > 0
            value = 0.0
        self._reward = min(max(value / dialect.max_score, 0.0), 1.0)
        self._is_done = is_done
        least = 0.0 if dialect.is_solved_by_any_score else dialect.max_score
        self._is_success = is_done and value >= least and value > 0.0
        self._offered = self._offered_actions(reply, observation)
        return self._result(observation, is_valid=is_valid)

    def _offered_actions(self, reply: object, observation: str) -> list[str]:
        """Return the actions that a reply lists."""
        if self._dialect is ALFWORLD:
            actions = self._field(reply, "available_actions", list)
            return self._texts(actions, "available_actions")
        listed = OFFERED.search(observation) if self._dialect is BABYAI else None
        try:
            return self._texts(json.loads(listed[1]), "Available actions") if listed else []
        except ValueError:
            return []  # The list is only a hint.

    def _field(self, reply: object, key: str, kind: type[T]) -> T:
        """Return a field of a reply. Raises: RemoteFailure: it is missing or has another type."""
        value = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(value, kind):
            shown = json.dumps(reply)[:200]
            raise self._connection.failure(f"an answer has no valid {key!r}: {shown}")
        return value

    def _score(self, reply: object) -> float:
        """Return the score of a step. Raises: RemoteFailure: it is no number."""
        key = self._dialect.score_key
        value = reply.get(key) if isinstance(reply, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            text = f"a step has {key}={value!r}, which is not a finite number"
            raise self._connection.failure(text)
        return float(value)

    def _text(self, reply: object, what: str) -> str:
        """Return a text. Raises: RemoteFailure: it is none."""
        if not isinstance(reply, str):
            raise self._connection.failure(f"{what} is not a text: {json.dumps(reply)[:200]}")
        return reply

    def _texts(self, reply: object, what: str) -> list[str]:
        """Return a list of texts. Raises: RemoteFailure: it is none."""
        if not isinstance(reply, list):
            raise self._connection.failure(f"{what} is not a list: {json.dumps(reply)[:200]}")
        return [self._text(each, what) for each in reply]

    @asynccontextmanager
    async def _limit(self, what: str) -> AsyncIterator[None]:
        """Limit the time of the block to the timeout. Raises: RemoteFailure."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            text = f"{what} took more than {self._timeout_s:g} s"
            raise self._connection.failure(text) from error


def check(remote: RemoteOptions) -> list[str]:
    """Return the errors in the options, with remedies; sends no request."""
    lines: list[str] = []
    if remote.dialect not in DIALECTS:
        hint = known_hint(remote.dialect, DIALECTS)
        lines.append(f"env.dialect={remote.dialect!r} is unknown{hint}")
    if not URL.fullmatch(remote.url):
        lines.append(f"env.url={remote.url!r} is not a URL; an example is http://10.0.0.5:36001")
    return lines


def make_spec(remote: RemoteOptions) -> EnvSpec:
    """Return the catalogue entry of an AgentGym server, named after its dialect.

    Raises: ConfigError: unknown dialect, no URL, or a file without items of the dialect.
    """
    problems = check(remote)
    if problems:
        raise ConfigError("; ".join(problems))
    dialect = DIALECTS[remote.dialect]
    numbers = indices_of(dialect, remote)
    subset = SubsetSpec(
        num_train=len(numbers["train"]), num_test=len(numbers["test"]), max_turns=remote.max_turns
    )
    connection = AgentGymConnection(dialect, remote)

    def make(style: Style) -> RemoteEnv:
        return RemoteEnv(connection, numbers, subset, style, timeout_s=remote.timeout_s)

    return EnvSpec(
        name=dialect.name,
        subsets={SUBSET: subset},
        **begun(dialect.name, dict(dialect.instruction)),
        make=make,
        isolation=Isolation.TASK,
        sessions_per_worker=max_sessions(dialect, remote),
        step_timeout_s=2 * remote.timeout_s + dialect.close_timeout_s,  # An instance and its reset.
        stop=connection.stop,
        stop_timeout_s=dialect.close_timeout_s,
        content={
            f"env.{split}_items": hashlib.sha256(json.dumps(list(each)).encode()).hexdigest()
            for split, each in numbers.items()
            if getattr(remote, f"{split}_items")
        },
    )
