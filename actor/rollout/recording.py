"""Records of running episodes, by which an episode continues after the loss of its hub or actor.

The loop of an episode is a function of the opening of its session, of the sampled turns and of the
results of its steps. A record holds these in order. To continue, the loop runs again: the turns and
the results of the record replace those of the engine and the hub. Contexts, branches, plans and
summaries are so rebuilt exactly, and the first request to the engine is the one that was lost.

The environment loads its last saved state. Steps after that state, or all steps where it saves
none, are performed again if equal actions have equal results. Results that differ from the record,
or another prompt, end the attempt with `CannotContinue`: the episode begins anew.

A fork begins with the first turns of another episode's record (`common.segments`). The trunk hands
it out when it asks for the turn after them, so that the forks have at least one turn of their own.

With a folder, each step is appended to a file, and leaves the memory. The file is read after the
loss of the hub, and by an actor that plays the next attempt at the episode. The files survive a
killed process, not a power cut: they are not synced.
"""

import asyncio
import hashlib
import json
import logging
import os
import shutil
import time
import zlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

import numpy as np

from actor.rollout.context import Turn
from actor.rollout.env_client import ExpertHint, HubSession, HubStepResult
from actor.rollout.episode import Act, EnvSession, OpenSession
from common.config.groups import GroupsSection
from common.config.learner import PartialEpisodes
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError, HubLost, LongstrideError
from common.host.process_settings import cache_home
from common.ids import episode_id_of
from common.store.run_dir import write_atomically
from common.wire.messages import EpisodeKind, Lease, PolicyKind

logger = logging.getLogger(__name__)

FORMAT = 1
TURNS = ".turns"  # Suffix of the file with the opening, the turns and the steps.
STATE = ".state"  # Suffix of the file with the environment's last saved state.
# Records of episodes that no actor took up again.
MAX_AGE_S = 7 * 86_400.0
FORK_ATTEMPT = -1  # Attempt in the name of the file that a fork begins with.
MAX_STARTS = 1_024  # Begins of forks in memory.
# Fields of an episode that differ within a tree.
OF_MEMBER = ("episode_id", "member", "seed")
# Fields of a step's result that are equal if the action is repeated. Metrics may hold times.
COMPARED = ("observation", "reward", "done", "is_valid", "is_success", "state", "is_truncated")


class CannotContinue(LongstrideError):
    """A recorded episode cannot continue; it begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRule:
    """Decides by the versions of its tokens whether an episode may continue.

    Example (bound of 4 steps, stretch 2, 1 step ahead): tokens of the versions 3 to 7 took four
    steps, so the episode may be five steps old when it continues. If the learner holds back two
    versions, the engine may have the version 6 at most.
    """

    needs_one_version: bool
    max_lag_steps: int  # The configured bound of the learner.
    max_stretch: float  # Factor by which the scheduler may raise it.
    max_ahead_steps: int
    hold_back_steps: int = 0  # Versions by which the learner is ahead of the engine.
    is_by_turn: bool = False  # The learner trains the fresh turns of an episode without the others.

    def why_not(self, lease: Lease, versions: set[int], *, version: int) -> str:
        """Return why an episode must not continue; "" if it may.

        It must be trainable at its end, or its later turns must be. The bound on its lag is
        predicted as the scheduler does, from the steps that the recorded part took.

        Args:
            versions: versions of the recorded tokens.
            version: version of the engine's weights now.
        """
        if self.needs_one_version or lease.kind is EpisodeKind.EVAL:
            return "" if versions == {version} else f"all its tokens need the version {version}"
        if self.is_by_turn:
            return ""
        lag = version + self.hold_back_steps - min(versions)
        predicted = max(versions) - min(versions) + self.max_ahead_steps
        most = int(self.max_lag_steps * self.max_stretch)
        bound = min(max(predicted, self.max_lag_steps), most)
        return "" if lag <= bound else f"its oldest token has a lag of {lag} steps, not {bound}"


# (lease, versions of the recorded tokens) -> why the episode must not continue, "" if it may
WhyNot = Callable[[Lease, set[int]], str]


def why_not_of(cfg: RunConfig, version: Callable[[], int]) -> WhyNot:
    """Return the rule of a run; `version` returns that of the engine's weights."""
    rule = LagRule(
        needs_one_version=cfg.train.mode == "sync",
        max_lag_steps=cfg.learner.max_lag_steps,
        max_stretch=cfg.scheduler.max_stretch,
        max_ahead_steps=cfg.scheduler.max_ahead_steps,
        hold_back_steps=cfg.learner.hold_back_steps,
        is_by_turn=cfg.learner.partial_episodes is PartialEpisodes.TURNS,
    )
    return lambda lease, versions: rule.why_not(lease, versions, version=version())


class RecordedTurn(NamedTuple):
    """A turn that the policy sampled, in compact form, and the digest of its prompt."""

    prompt: str
    rest: Turn  # The turn without its tokens and experts.
    token_ids: "array[int]"
    logprobs: "array[float]"
    versions: "array[int]"
    experts: np.ndarray | None  # Without the rows of the tokens that the turn before recorded.
    num_earlier: int  # Number of these rows.

    @classmethod
    def of(cls, prompt: str, taken: Turn, *, num_earlier: int = 0) -> "RecordedTurn":
        """Return the record of a turn, whose first tokens had experts in the turn before."""
        experts = None if taken.experts is None else taken.experts[num_earlier:].copy()
        return cls(
            prompt,
            replace(taken, token_ids=[], logprobs=[], versions=[], experts=None),
            array("i", taken.token_ids),
            array("d", taken.logprobs),
            array("i", taken.versions),
            experts,
            num_earlier,
        )

    @property
    def bare(self) -> Turn:
        """The turn as it was sampled, without its experts."""
        return replace(
            self.rest,
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            versions=self.versions.tolist(),
        )

    def taken_after(self, before: np.ndarray | None) -> Turn:
        """Return the turn as it was sampled; its first rows are experts of the turn before.

        The first record of a token counts, so the rows that the engine made again are not stored.
        """
        experts = self.experts
        if experts is not None and self.num_earlier:
            assert before is not None  # It has the rows.
            experts = np.concatenate([before[: self.num_earlier], experts])
        return replace(self.bare, experts=experts)


class RecordedStep(NamedTuple):
    """A step of the environment, with the number of turns that were sampled before it."""

    action: str
    result: HubStepResult
    num_turns: int


@dataclass(slots=True)
class EpisodeEvents:
    """The events of one episode, in order. The first ones may be in its file alone."""

    head: dict[str, Any]  # Identity of the episode, and what all its tokens have in common.
    opening: str = ""  # Digest of the session's begin; "" before the first session.
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])
    steps: list[RecordedStep] = field(default_factory=list[RecordedStep])
    first_turn: int = 0  # Turns that only the file has; `turns` has those after them.
    first_step: int = 0
    is_over: bool = False  # The last step ended the episode.
    saved: str = ""  # The environment's last saved state; "" if there is none.
    num_saved: int = 0  # Steps that `saved` contains.
    num_shared: int = 0  # First steps, which a fork took over from its trunk.
    trunk: int = 0  # Member number of the trunk.
    # Versions of all tokens that this episode sampled itself.
    versions: set[int] = field(default_factory=set[int])

    @property
    def num_turns(self) -> int:
        return self.first_turn + len(self.turns)

    @property
    def num_steps(self) -> int:
        return self.first_step + len(self.steps)

    def add_turn(self, turn: RecordedTurn) -> None:
        """Append a sampled turn."""
        self.turns.append(turn)
        if self.num_steps >= self.num_shared:
            self.versions.update(turn.versions)

    def add_step(self, action: str, result: HubStepResult) -> None:
        """Append a step of the environment."""
        self.steps.append(RecordedStep(action, result, self.num_turns))
        self.is_over = result.done

    def release(self) -> None:
        """Remove the steps and their turns from memory: a file has them."""
        num_turns = self.steps[-1].num_turns
        del self.turns[: num_turns - self.first_turn]
        self.first_turn = num_turns
        self.first_step = self.num_steps
        self.steps.clear()

    def forked(self, head: dict[str, Any] | None = None) -> "EpisodeEvents":
        """Return the events up to the last step, as the begin of another episode."""
        turns = self.turns[: self.steps[-1].num_turns]
        uncounted = [t._replace(rest=replace(t.rest, num_prompt=0, num_cached=0)) for t in turns]
        return EpisodeEvents(
            head=head or self.head,
            opening=self.opening,
            turns=uncounted,
            steps=list(self.steps),
            saved=self.saved,
            num_saved=self.num_saved,
            num_shared=len(self.steps),
            trunk=self.trunk if self.num_shared else self.head["member"],
        )


def head_of(lease: Lease, *, temperature: float) -> dict[str, Any]:
    """Return what the attempts at an episode have in common."""
    identity = lease.identity() | {"format": FORMAT, "temperature": temperature}
    del identity["attempt"], identity["lease_mac"]
    return cast(dict[str, Any], json.loads(json.dumps(identity)))


def digest_of(*parts: bytes) -> str:
    """Return a digest of 64 bits."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


def opening_of(session: HubSession) -> str:
    """Return a digest of the begin of a session."""
    begin = [session.first_messages, session.tools, session.start_score]
    texts = (session.first_observation, session.first_state, json.dumps(begin, sort_keys=True))
    return digest_of(*(text.encode(errors="surrogatepass") for text in texts))


class Recording:
    """The record of one attempt at an episode, and its replay. Not for use by two tasks at once.

    Example: 5 turns and 4 steps are recorded when the hub is lost. `replay` starts over: the loop
    gets 5 turns and 4 results from the record. Its fifth step goes to a new session, into which the
    state after step 4 was loaded. Its sixth turn is sampled.
    """

    def __init__(
        self, owner: "Recordings", lease: Lease, events: EpisodeEvents, file: "RecordFile | None"
    ) -> None:
        """`Recordings.begin` creates it."""
        self.events = events
        self._owner = owner
        self._lease = lease
        self._file = file
        self._turn = self._step = 0  # Next turn and step of the replay.
        self._tokens = array("i")  # All tokens of the last turn whose experts are recorded.
        self._num_rows = 0  # Number of its tokens with a record.
        self._rows: np.ndarray | None = None  # Its record, during the replay.
        self._is_on = True

    def usable(self) -> "Recording":
        """Return this record with all events in memory, or an empty one if it cannot continue."""
        num = self.events.num_steps
        if not num:
            return self
        versions = self.events.versions
        if versions and (reason := self._owner.why_not(self._lease, versions)):
            return self.renewed(reason)
        if self._file is not None and not self._file.restore(self.events):
            return self.renewed("its record is damaged or was removed")
        what = "forking" if num == self.events.num_shared else "continuing"
        logger.info("%s episode=%s steps=%d", what, self._lease.episode_id, num)
        return self

    def renewed(self, reason: str) -> "Recording":
        """Return an empty record in place of this one, which cannot continue."""
        episode_id = self._lease.episode_id
        num = self.events.num_steps
        logger.warning("beginning anew episode=%s steps=%d reason=%s", episode_id, num, reason)
        self._owner.abandon(episode_id)
        if num == self.events.num_shared:  # Another attempt would fail in the same way.
            self._owner.forget_start(episode_id)
        return self._owner.begin(self._lease)

    def replay(self, open_session: OpenSession, act: Act) -> tuple[OpenSession, Act]:
        """Return the functions that replay the record before they use the hub and the engine."""
        self._turn = self._step = 0
        self._num_rows = 0

        async def open_recorded() -> EnvSession:
            session = await open_session()
            if not isinstance(session, HubSession):  # A seat: other players act in its episode.
                self._is_on = False
                self._owner.check_forks(self._lease, "has seats, and is not recorded")
                return session
            try:
                await self._continue_in(session)
            except BaseException:
                await session.close()
                raise
            return RecordedSession(session, self)

        async def act_recorded(ids: list[int], session: EnvSession) -> Turn:
            if not self._is_on:
                return await act(ids, session)
            prompt = digest_of(np.asarray(ids, dtype=np.int32).tobytes())
            events = self.events
            if self._turn == events.num_turns:
                self._owner.offer_forks(self._lease, events, self._file)
                asked = time.monotonic()
                taken = await act(ids, session)
                took_s = time.monotonic() - asked
                if taken.experts is not None and self._file is not None:
                    self._file.close()  # They are too large for it.
                timed = replace(taken, earlier_s=took_s)
                num_earlier = self._num_earlier(ids)
                events.add_turn(RecordedTurn.of(prompt, timed, num_earlier=num_earlier))
                self._note_experts(ids, taken, is_replayed=False)
                self._turn += 1
                return taken
            recorded = events.turns[self._turn]
            if recorded.prompt != prompt:
                raise CannotContinue(f"the prompt of turn {self._turn} differs from the record")
            self._turn += 1
            # The other tasks of the actor run between two turns: a replay may have thousands.
            await asyncio.sleep(0)
            taken = recorded.taken_after(self._rows)
            self._note_experts(ids, taken, is_replayed=True)
            return taken

        return open_recorded, act_recorded

    def _num_earlier(self, ids: list[int]) -> int:
        """Return how many tokens of a prompt have experts of the turn that it continues."""
        num = len(self._tokens)
        return self._num_rows if self._num_rows and self._tokens == array("i", ids[:num]) else 0

    def _note_experts(self, ids: list[int], taken: Turn, *, is_replayed: bool) -> None:
        """Remember the tokens of a turn that have experts, for the turn that continues it."""
        self._num_rows = 0 if taken.experts is None else len(taken.experts)
        self._rows = taken.experts if is_replayed else None
        if self._num_rows:
            self._tokens = array("i", [*ids, *taken.token_ids])

    async def step(self, session: HubSession, action: str) -> HubStepResult:
        """Return a recorded result, or that of the session."""
        events = self.events
        if self._step < events.num_steps:
            step = events.steps[self._step]
            if step.action != action:
                raise CannotContinue(f"the action of step {self._step} differs from the record")
            self._step += 1
            return step.result
        asked = time.monotonic()
        result = await session.step(action)
        took_s = time.monotonic() - asked
        self._step += 1
        events.add_step(action, replace(result, earlier_s=took_s))
        if session.saved:
            events.saved, events.num_saved = session.saved, events.num_steps
        if self._file is not None:
            self._file.append(events)
        return result

    async def _continue_in(self, session: HubSession) -> None:
        """Bring a new session into the state after the last recorded step.

        Raises: CannotContinue. HubLost: the hub is lost again.
        """
        events = self.events
        opening = opening_of(session)
        if events.opening not in ("", opening):
            raise CannotContinue("the environment's first observation differs from the record")
        events.opening = opening
        session.saves = session.can_save
        if not (session.can_save or session.is_repeatable):
            self._owner.check_forks(self._lease, "can neither save its state nor repeat actions")
        if not events.steps or events.is_over:
            return
        try:
            num_done = 0
            if events.saved and session.can_save:
                await session.load(events.saved)
                num_done = events.num_saved
            if num_done < len(events.steps) and not session.is_repeatable:
                raise CannotContinue("its environment can neither load a state nor repeat actions")
            for number, step in enumerate(events.steps[num_done:], num_done):
                result = await session.step(step.action)
                for name in COMPARED:
                    if getattr(result, name) != getattr(step.result, name):
                        raise CannotContinue(f"{name} differs when step {number} is repeated")
        except HubLost:
            raise
        except EnvError as error:
            raise CannotContinue(str(error)) from error


class RecordedSession:
    """The session of a recorded episode. It is an `EnvSession` of `actor.rollout.episode`."""

    def __init__(self, session: HubSession, recording: Recording) -> None:
        self._session = session
        self._recording = recording
        self.first_observation = session.first_observation
        self.first_state = session.first_state
        self.start_score = session.start_score
        self.first_messages = session.first_messages
        self.tools = session.tools

    async def step(self, action: str) -> HubStepResult:
        """Perform an action, or return its recorded result. Raises: EnvError, CannotContinue."""
        return await self._recording.step(self._session, action)

    async def hint(self) -> ExpertHint:
        """Return the information that a scripted policy may use. Raises: EnvError, EnvTimeout."""
        return await self._session.hint()

    async def close(self) -> None:
        await self._session.close()


class RecordFile:
    """The file of one attempt. A line is a checksum and JSON; a torn last line is ignored."""

    def __init__(self, path: Path, events: EpisodeEvents) -> None:
        """Write the events so far. They may be those of an earlier attempt."""
        self._path = path
        self._num_turns = self._num_steps = 0  # Events that are in the file.
        self._num_saved = 0
        self._is_closed = False
        self._try(lambda: self._create(events))
        if events.steps:
            self._try(lambda: self._append(events))

    def append(self, events: EpisodeEvents) -> None:
        """Append the new steps and release them. A full disk ends the file, not the episode."""
        self._try(lambda: self._append(events))
        if not self._is_closed:
            events.release()

    def close(self) -> None:
        """Append nothing more."""
        self._is_closed = True

    def restore(self, events: EpisodeEvents) -> bool:
        """Put the released events back into memory; return False if the file lacks any."""
        if not events.first_step:
            return True
        try:
            written = read_events(self._path)
        except (OSError, ValueError) as error:
            logger.warning("record cannot be read path=%s reason=%r", self._path, error)
            return False
        if written is None or written.num_steps < events.first_step:
            return False
        events.turns[:0] = written.turns[: events.first_turn]
        events.steps[:0] = written.steps[: events.first_step]
        events.first_turn = 0
        events.first_step = 0
        return True

    def _create(self, events: EpisodeEvents) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        shared = {"shared": events.num_shared, "trunk": events.trunk}
        of_fork = shared if events.num_shared else {}
        self._path.write_bytes(line_of({"head": events.head} | of_fork))

    def _append(self, events: EpisodeEvents) -> None:
        lines: list[bytes] = []
        for step in events.steps[self._num_steps - events.first_step :]:
            first, end = (num - events.first_turn for num in (self._num_turns, step.num_turns))
            turns = events.turns[first:end]
            lines.append(
                line_of(
                    {
                        "opening": events.opening,
                        "turns": [[turn.prompt, turn_as_json(turn.bare)] for turn in turns],
                        "action": step.action,
                        "result": asdict(step.result),
                    }
                )
            )
            self._num_turns = step.num_turns
        with self._path.open("r+b") as file:  # A removed file is not created again.
            file.seek(0, os.SEEK_END)
            file.write(b"".join(lines))
        self._num_steps = events.num_steps
        if events.num_saved > self._num_saved:
            self._num_saved = events.num_saved
            write_atomically(self._path.with_suffix(STATE), f"{events.num_saved} {events.saved}")

    def _try(self, write: Callable[[], None]) -> None:
        """Write; after a failure nothing more is written."""
        if self._is_closed:
            return
        try:
            write()
        except OSError as error:
            self._is_closed = True
            logger.warning("episode is not recorded path=%s reason=%s", self._path, error)


def turn_as_json(taken: Turn) -> dict[str, Any]:
    """Return a turn as JSON, without experts."""
    return {
        "token_ids": taken.token_ids,
        "logprobs": taken.logprobs,
        "versions": taken.versions,
        "is_stopped": taken.is_stopped,
        "num_prompt": taken.num_prompt,
        "num_cached": taken.num_cached,
        "waited_s": taken.waited_s,
        "earlier_s": taken.earlier_s,
    }


def line_of(content: dict[str, Any]) -> bytes:
    """Return a line of a record file."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_events(path: Path) -> EpisodeEvents | None:
    """Return the events of a record file up to its first damaged line; None without any."""
    events: EpisodeEvents | None = None
    for line in path.read_bytes().split(b"\n")[:-1]:
        if line[:9] != b"%08x " % zlib.crc32(line[9:]):
            break
        content = json.loads(line[9:])
        if events is None:
            events = EpisodeEvents(
                head=content["head"],
                num_shared=content.get("shared", 0),
                trunk=content.get("trunk", 0),
            )
            continue
        events.opening = content["opening"]
        for prompt, taken in content["turns"]:
            events.add_turn(RecordedTurn.of(prompt, Turn(**taken)))
        events.add_step(content["action"], HubStepResult(**content["result"]))
    if events is not None and len(events.steps) < events.num_shared:  # A torn begin of a fork.
        return None
    if events is not None and path.with_suffix(STATE).is_file():
        number, _, saved = path.with_suffix(STATE).read_text(encoding="utf-8").partition(" ")
        if 0 < int(number) <= len(events.steps):  # Its step may be in the torn end of the file.
            events.saved, events.num_saved = saved, int(number)
    return events


class Recordings:
    """The records of the episodes that an engine plays.

    Example: actor-0 is killed in attempt 0 of g/1 after 900 steps. Actor-1 gets the lease of
    attempt 1. `begin` reads `g%2F1.0.turns`, writes its content to `g%2F1.1.turns` and removes the
    first file. If actor-0 is still alive after all, it writes to a removed file.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        temperature: float = 1.0,
        groups: GroupsSection | None = None,
        why_not: WhyNot = lambda _, __: "",
    ) -> None:
        """Use no files if `folder` is None.

        Args:
            groups: names the forks of each member of a group; None: there are none.
            why_not: returns why an episode with tokens of these versions must not continue; "" if
                it may.
        """
        self._folder = folder
        self._temperature = temperature
        self.why_not = why_not
        self._groups = groups or GroupsSection()
        self._starts: dict[str, EpisodeEvents] = {}  # Begins of forks, by episode.
        self.on_start: Callable[[str], None] = lambda _: None  # A fork has a begin.
        self._own: dict[str, Path] = {}  # Files of this engine's attempts, by episode.
        if folder is not None and folder.is_dir():
            self._remove(each for each in folder.iterdir() if _age_s(each) > MAX_AGE_S)

    def begin(self, lease: Lease) -> Recording:
        """Return the record of an attempt, with the events of an earlier attempt if there are any.

        Reads the files of the episode, and blocks meanwhile.
        """
        head = head_of(lease, temperature=self._temperature)
        start = self._starts.get(lease.episode_id)
        events = start.forked(head) if start else EpisodeEvents(head=head)
        file: RecordFile | None = None
        if self._folder is not None:
            earlier = self._files_of(lease.episode_id)
            events = self._newest(earlier, head) or events
            path = self._folder / f"{_name_of(lease.episode_id)}.{lease.attempt}{TURNS}"
            file = RecordFile(path, events)
            self._own[lease.episode_id] = path
            start = _start_of(self._folder, lease.episode_id)
            left = {path.stem, start.stem}
            self._remove(each for each in earlier if each.stem not in left)
        return Recording(self, lease, events, file)

    # --- forks --------------------------------------------------------------------------------

    def trunk_of(self, lease: Lease) -> str:
        """Return the episode that a leased episode continues; "" if it is no fork."""
        is_fork = _may_fork(lease) and self._groups.fork_turn(lease.member) > 0
        return episode_id_of(lease.group_id, self._groups.trunk_of(lease.member)) if is_fork else ""

    def forks_of(self, lease: Lease) -> dict[str, int]:
        """Return the forks of an episode, with the number of turns that each shares."""
        members = self._groups.forks_of(lease.member) if _may_fork(lease) else ()
        turn_of = self._groups.fork_turn
        return {episode_id_of(lease.group_id, m): turn_of(m) for m in members}

    def has_start(self, episode_id: str) -> bool:
        """Return whether a fork can begin: its trunk has reached its turn, or it has a record."""
        has_files = self._folder is not None and bool(self._files_of(episode_id))
        return has_files or episode_id in self._starts

    def offer_forks(
        self, lease: Lease, events: EpisodeEvents, file: "RecordFile | None" = None
    ) -> None:
        """Let forks begin that share all steps of an episode, which asks for its next turn.

        Args:
            file: has the events that were released.
        """
        names = [name for name, num in self.forks_of(lease).items() if num == events.num_steps]
        if names and file is not None and not file.restore(events):
            logger.warning(
                "no fork begins episode=%s reason=its record is damaged", lease.episode_id
            )
            return
        for name in names:
            start = events.forked()
            self._starts[name] = start
            if len(self._starts) > MAX_STARTS:
                del self._starts[next(iter(self._starts))]
            if self._folder is not None and all(t.experts is None for t in start.turns):
                RecordFile(_start_of(self._folder, name), start)
            self.on_start(name)

    def forget_start(self, episode_id: str) -> None:
        """Remove the begin of a fork, so that it plays from its first turn."""
        self._starts.pop(episode_id, None)
        if self._folder is not None:
            path = _start_of(self._folder, episode_id)
            self._remove([path, path.with_suffix(STATE)])

    def check_forks(self, lease: Lease, why: str) -> None:
        """Raise ConfigError if an episode has forks, or is one."""
        if self._groups.forks and _may_fork(lease):
            raise ConfigError(
                f"groups.forks={self._groups.forks}: the environment {lease.env} {why}; set"
                " groups.forks=0, or give the environment save() and load(state)"
            )

    def abandon(self, episode_id: str) -> None:
        """Remove the files of this engine's attempt. Another actor may play the next one."""
        if (path := self._own.pop(episode_id, None)) is not None:
            self._remove([path, path.with_suffix(STATE)])

    def drop(self, episode_id: str) -> None:
        """Remove the files of all attempts at an episode: the learner has it."""
        self._own.pop(episode_id, None)
        self._starts.pop(episode_id, None)
        if self._folder is not None:
            self._remove(self._files_of(episode_id))

    def drop_all(self) -> None:
        """Remove all files: the run is over."""
        if self._folder is not None and self._folder.is_dir():
            self._remove(self._folder.iterdir())

    def _files_of(self, episode_id: str) -> list[Path]:
        """Return the files of all attempts at an episode."""
        assert self._folder is not None
        if not self._folder.is_dir():
            return []
        return list(self._folder.glob(f"{_name_of(episode_id)}.*[0-9].*"))

    def _newest(self, files: Iterable[Path], head: dict[str, Any]) -> EpisodeEvents | None:
        """Return the events of the newest attempt of the same episode; None without one."""
        records = [path for path in files if path.suffix == TURNS]
        for path in sorted(records, key=lambda each: int(each.stem.rpartition(".")[2]))[::-1]:
            try:
                events = read_events(path)
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("ignored record of an episode path=%s reason=%r", path, error)
                continue
            if events is None:
                continue
            if path == _start_of(path.parent, head["episode_id"]):
                if _of_tree(events.head) == _of_tree(head):
                    return replace(events, head=head)
            elif events.head == head:
                return events
        return None

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            path.unlink(missing_ok=True)


def records_here(server_public: str) -> Path | None:
    """Return a folder of this user and machine for the records of a run; None if it has none.

    Folders of other runs without a change for `MAX_AGE_S` are removed.

    Args:
        server_public: public key of the run's listeners.
    """
    above = cache_home() / "longstride" / "episodes"
    folder = above / digest_of(server_public.encode())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for each in above.iterdir():
            if each != folder and _age_s(each) > MAX_AGE_S:
                shutil.rmtree(each, ignore_errors=True)
    except OSError as error:
        logger.warning("records of episodes stay in memory folder=%s reason=%s", above, error)
        return None
    return folder


def _name_of(episode_id: str) -> str:
    """Return an episode id as part of a file name."""
    return quote(episode_id, safe="")


def _start_of(folder: Path, episode_id: str) -> Path:
    """Return the file that a fork begins with."""
    return folder / f"{_name_of(episode_id)}.{FORK_ATTEMPT}{TURNS}"


def _may_fork(lease: Lease) -> bool:
    return lease.kind is EpisodeKind.TRAIN and lease.policy is PolicyKind.MODEL


def _of_tree(head: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a head that the members of a tree share."""
    return {name: value for name, value in head.items() if name not in OF_MEMBER}


def _age_s(path: Path) -> float:
    """Return the seconds since a file was written; 0 if it was removed."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
