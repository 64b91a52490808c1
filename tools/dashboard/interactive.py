"""Interactive episodes: a user in a browser, or a policy, acts one step at a time.

Their hubs and policies are commands of the product, started on demand and stopped when idle. A
recorded episode is replayed in a fresh environment for a picture of the state before each turn.
"""

import asyncio
import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from actor.api.chat_endpoints import find_endpoint
from actor.policy import PolicySection
from actor.rollout.context import CUT_MARK
from actor.rollout.env_client import HubClient, HubSession, HubStepResult
from actor.rollout.episode import ContextFull, PolicyFailed, first_text, state_number
from actor.seats.endpoint import Endpoint
from common.config.actor import AgentFormat
from common.errors import ConfigError, EnvError
from common.formats.answers import MARK, read_react, worded
from common.host.child_process import ChildFailed, ChildProcess
from common.host.guardian import Guardian
from common.repository import CODE

START_S = 60.0
STOP_S = 3.0
# In the environment, because all users can read command lines with `ps`.
TOKEN = "LONGSTRIDE_TABLE_TOKEN"
REPLAY_S = 30.0  # Seconds for a whole episode.
SHOWN_CHARS = 400  # Maximum length of a differing observation in the problem, in characters.
CUT_WORDS = 40  # Words before the cut that are compared if the observation was cut.
SAME_SCORE = 1e-4
MAX_EPISODES = 8  # Maximum number of concurrent episodes. One more is refused.
IDLE_S = 300.0  # Seconds without use after which an episode is closed or a service is stopped.
CALL_S = 30.0  # Seconds of one request to a hub.
ENGINE_START_S = 300.0
NUM_CHECKS = 20  # Checks for idle episodes within `IDLE_S`.
# Maximum number of valid actions that a page receives. Some environments have thousands.
MAX_ACTIONS = 300
STYLE = "compact"
HEADS = ("instruction", "acknowledgement")  # Texts of an environment before its first observation.
T = TypeVar("T")


def options_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the overrides that give a hub the environment settings of a run."""
    envs = config.get("envs")
    sections: dict[str, Any] = envs if isinstance(envs, dict) else {}
    return tuple(f"envs.{name}={json.dumps(value)}" for name, value in sorted(sections.items()))


class ServiceCommand:
    """A command that prints its address. Its log is in a temporary folder, outside of any run.

    Example: address = await Service(root, ["envhub", "port=0"], token="t").address()
    """

    def __init__(
        self,
        root: Path,
        words: Sequence[str],
        *,
        token: str,
        prefix: str = "hub: ",
        start_s: float = START_S,
    ) -> None:
        """Create the service without starting it.

        Args:
            root: folder of `run.py`.
            words: arguments of the command; ${oc.env:LONGSTRIDE_TABLE_TOKEN} is the token.
            prefix: beginning of the printed line that holds the address.
        """
        self._mark = prefix
        self._start_s = start_s
        self._argv = [sys.executable, str(root / "run.py"), *words]
        self._env = {TOKEN: token}
        self._starting = asyncio.Lock()
        self._running: tuple[ChildProcess, str] | None = None
        self._stack = contextlib.ExitStack()
        self.used_at = time.monotonic()

    async def address(self) -> str:
        """Return the address of the running command; start it if it does not run.

        Raises: EnvError: it did not start; the message has its last lines.
        """
        async with self._starting:
            if self._running is None or self._running[0].poll() is not None:
                await asyncio.to_thread(self._stop)
                self._running = await asyncio.to_thread(self._start)
            self.used_at = time.monotonic()
            return self._running[1]

    async def stop(self, *, unused_s: float = 0.0) -> None:
        """Stop the command if it was unused for `unused_s`; it can be started again."""
        async with self._starting:
            if time.monotonic() - self.used_at >= unused_s:
                await asyncio.to_thread(self._stop)

    def _start(self) -> tuple[ChildProcess, str]:
        """Start the command, and wait until it prints its address; return both."""
        folder = Path(tempfile.mkdtemp(prefix="longstride-"))
        log = folder / "log"
        name = self._argv[2]
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        guardian = Guardian()
        self._stack.callback(guardian.close)
        child = ChildProcess(name, self._argv, log_path=log, env=self._env, guardian=guardian)
        self._stack.callback(child.stop, timeout_s=STOP_S)
        try:
            child.wait_until(lambda: _announcement(log, self._mark) != "", timeout_s=self._start_s)
        except ChildFailed as error:
            last = " / ".join(child.log_tail(max_lines=3))
            self._stop()
            raise EnvError(f"{name} did not start: {last or error}") from error
        return child, _announcement(log, self._mark)

    def _stop(self) -> None:
        self._running = None
        self._stack.close()


def _announcement(log: Path, before: str) -> str:
    """Return the address that a command has printed, "" before that."""
    lines = log.read_text(errors="replace", encoding="utf-8").splitlines() if log.exists() else []
    return next((line.split()[1] for line in lines if line.startswith(before)), "")


class RecordedEpisode(TypedDict):
    """A journalled episode as texts."""

    env: str
    item: str
    style: str  # Name of the style of observations.
    actions: list[str]
    shown: list[str]  # Text shown before each action, including instructions and framing.
    scores: list[float]  # Score after each action.
    states: list[int]  # State before each action, see `actor.rollout.episode`; [0]: unknown.


class ReplayPictures(TypedDict):
    """Pictures of the states before each action and after the last, up to the first `problem`."""

    pictures: list[Any]
    problem: str  # "" if all pictures are present.


async def redo(
    client: HubClient, recorded: RecordedEpisode, *, limit_s: float = REPLAY_S
) -> ReplayPictures:
    """Replay an episode in a fresh environment, with a picture of each state.

    The replay stops with a `problem` when an observation, a state or a reward differs from the
    record: all later pictures would show another episode. It also stops at a failure or after
    `limit_s`.
    """
    done: ReplayPictures = {"pictures": [], "problem": ""}
    try:
        async with asyncio.timeout(limit_s):
            session = await client.open(
                recorded["env"], recorded["item"], seed=0, style=recorded["style"]
            )
            try:
                done["problem"] = await _follow(session, recorded, done["pictures"])
            finally:
                await session.close()
    except EnvError as error:
        done["problem"] = f"The environment failed during the replay: {error}"
    except TimeoutError:
        done["problem"] = f"The replay took longer than {limit_s:g} s."
    return done


async def _follow(session: HubSession, recorded: RecordedEpisode, pictures: list[Any]) -> str:
    """Append the pictures; return the reason for an early stop, "" at the end."""
    observation = session.first_observation
    state = session.first_state
    for turn, action in enumerate(recorded["actions"]):
        if problem := _difference(recorded, turn, observation, state):
            return problem
        pictures.append(await session.picture())
        result = await session.step(action)
        if problem := _changed_result(recorded, turn, result):
            return problem
        observation = result.observation
        state = result.state
    pictures.append(await session.picture())
    return ""


def _difference(recorded: RecordedEpisode, turn: int, observation: str, state: str) -> str:
    """Return how the state before an action differs from the record; "" if it does not."""
    shown = recorded["shown"][turn] if turn < len(recorded["shown"]) else None
    if shown is not None and not _holds(shown, observation):
        is_now = observation[:SHOWN_CHARS]
        was = shown.strip()[-SHOWN_CHARS:]
        return f"The observation before turn {turn + 1} is {is_now!r}, but was {was!r}."
    states = recorded["states"]
    if turn < len(states) and states[turn] != state_number(state or observation):
        return f"The state of the environment before turn {turn + 1} differs from the record."
    return ""


def _changed_result(recorded: RecordedEpisode, turn: int, result: HubStepResult) -> str:
    """Return how a result differs from the recorded one; "" if it is equal."""
    scores = recorded["scores"]
    if turn < len(scores) and abs(result.reward - scores[turn]) > SAME_SCORE:
        return f"The reward of turn {turn + 1} is {result.reward:g}, but was {scores[turn]:g}."
    if result.done and turn + 1 < len(recorded["actions"]):
        return f"The replay ended after turn {turn + 1}, not after {len(recorded['actions'])}."
    return ""


def _holds(shown: str, observation: str) -> bool:
    """Return whether the shown text contains the observation, whole or up to its cut."""
    before, cut, _ = shown.partition(CUT_MARK.partition("{")[0])
    whole = " ".join(observation.split())
    seen = before.split()
    if cut:
        return " ".join(seen[-CUT_WORDS:]) in whole
    return whole in " ".join(seen)


@dataclass(slots=True, kw_only=True)
class InteractiveEpisode:
    """One episode and the conversation about it."""

    client: HubClient
    session: HubSession
    about: dict[str, Any]  # The constant part of the answers to the page.
    messages: list[dict[str, str]]
    format: AgentFormat  # Format of a policy's answers. A user sends actions.
    turn: int = 0
    used_at: float = field(default_factory=time.monotonic)
    is_done: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class InteractiveEpisodes:
    """All interactive episodes. Its methods belong to one event loop.

    A mistake of the user is a ConfigError. A failing environment is an EnvError, which ends its
    episode. No file of a run is written.
    """

    def __init__(self, *, idle_s: float = IDLE_S) -> None:
        """Create the table without starting services; `root` is the folder of `run.py`."""
        self._idle_s = idle_s
        self._token = secrets.token_urlsafe(24)  # Token of the hubs.
        # kind of service -> the service, at most one for each kind
        self._services: dict[str, ServiceCommand] = {}
        self._words: dict[str, list[str]] = {}
        self._changing = asyncio.Lock()
        self._clients: dict[str, HubClient] = {}  # address -> client
        self._episodes: dict[str, InteractiveEpisode] = {}
        self._opening = 0
        self._upkeep: asyncio.Task[None] | None = None

    async def environments(self) -> dict[str, Any]:
        """Return subsets and their sizes by environment."""
        client = await self._hub(())
        catalogue = await client.request("GET", "/v1/envs", None)
        return {name: {"subsets": entry["subsets"]} for name, entry in catalogue.items()}

    async def open(
        self, env: str, item: str, *, style: str = STYLE, format: AgentFormat = AgentFormat.PLAIN
    ) -> dict[str, Any]:
        """Begin an episode and return its first view; its `id` identifies the episode.

        Args:
            style: style of the observations; a run's policy was trained with the run's own.
            format: format of the answers of a policy.
        """
        if len(self._episodes) + self._opening >= MAX_EPISODES:
            raise ConfigError(f"{MAX_EPISODES} episodes are open, the maximum; close one of them")
        self._opening += 1
        try:
            client = await self._hub(())
            entry = (await client.request("GET", "/v1/envs", None)).get(env)
            if entry is None:
                raise ConfigError(f"{env:.100}: the hub has no such environment")
            session = await client.open(env, item, seed=0, style=style)
        finally:
            self._opening -= 1
        head_texts = {each: str((entry.get(each) or {}).get(style, "")) for each in HEADS}
        instruction = worded(format, head_texts["instruction"])
        heads = filter(None, [instruction, head_texts["acknowledgement"]])
        texts = [*heads, session.first_observation]
        if not head_texts["acknowledgement"]:
            texts = [first_text(instruction, session.first_observation)]
        roles = ("user", "assistant", "user")[-len(texts) :]
        about = {"id": secrets.token_urlsafe(12), "env": env, "item": item}
        about |= {"instruction": head_texts["instruction"]}
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
        messages = [*session.first_messages, *messages]
        episode = InteractiveEpisode(
            client=client, session=session, about=about, messages=messages, format=format
        )
        self._episodes[about["id"]] = episode
        first = {"observation": session.first_observation, "reward": 0.0, "done": False}
        return await self._guarded(episode, lambda: self._described(episode, first))

    async def step(self, episode_id: str, action: str) -> dict[str, Any]:
        """Execute an action and return the next view."""
        episode = self._find(episode_id)
        return await self._guarded(episode, lambda: self._step(episode, action))

    async def ask(self, episode_id: str, *, url: str, model: str, key: str) -> dict[str, Any]:
        """Let a policy behind an OpenAI-compatible endpoint take one action."""
        episode = self._find(episode_id)
        cfg = PolicySection(url=url, model=model, max_tries=2, timeout_s=60.0)

        async def ask_policy() -> dict[str, Any]:
            """Request one action from the endpoint, and execute it."""
            if episode.is_done:
                raise ConfigError("The episode has ended. Start another one.")
            if episode.format is AgentFormat.FUNCTION_CALL:
                raise ConfigError(
                    "actor.format=function_call: only policies that answer with text can play here"
                )
            try:
                async with Endpoint(cfg, key=key) as endpoint:
                    reply = await endpoint.complete(episode.messages)
            except (PolicyFailed, ContextFull) as error:
                raise ConfigError(str(error)) from error
            answer = reply.text.strip()
            is_whole = MARK in episode.about["instruction"]
            action = (
                read_react(answer, is_whole=is_whole)
                if episode.format is AgentFormat.REACT
                else answer
            )
            return {**await self._step(episode, action or "", answer=answer), "by": reply.model}

        return await self._guarded(episode, ask_policy)

    async def ask_run(self, episode_id: str, run: str) -> dict[str, Any]:
        """Let a run's own policy take one action.

        The action is sampled by the engine of an actor on this machine, if one is reachable.
        Otherwise an engine is started with the run's newest checkpoint.

        Args:
            run: the run's folder.
        """
        root, self._find(episode_id).used_at = Path(run), time.monotonic()
        if door := await find_endpoint(root):
            return await self.ask(episode_id, url=door.url, model=root.name, key=door.key)
        if not (root / "config.yaml").is_file():
            raise ConfigError(f"{root}/config.yaml is missing, so the policy is unknown")
        words = ["serve", f"run.dir={root.parent}", f"run.name={root.name}"]
        words += ["policy.url=", f"policy.api_key_env={TOKEN}", *_newest_checkpoint(root)]
        try:
            url = await self._address("policy", words, prefix="policy: ", start_s=ENGINE_START_S)
        except EnvError as error:  # A user can still play the episode.
            raise ConfigError(str(error)) from error
        return await self.ask(episode_id, url=url, model=root.name, key=self._token)

    async def close(self, episode_id: str) -> None:
        """End an episode. An episode that has already ended is no error."""
        if episode := self._episodes.pop(episode_id, None):
            await episode.session.close()

    async def redo(self, recorded: RecordedEpisode, config: Mapping[str, Any]) -> ReplayPictures:
        """Replay a recorded episode for its pictures; see `redo`."""
        return await redo(await self._hub(options_of(config)), recorded)

    async def shut_down(self) -> None:
        """Stop all services and close all connections."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        self._episodes.clear()
        ending = [each.stop() for each in self._services.values()]
        await asyncio.gather(*ending, *(client.close() for client in self._clients.values()))

    async def _hub(self, options: tuple[str, ...]) -> HubClient:
        """Return a client of the hub with these options. Raises: EnvError: it does not start."""
        token = f"envhub.token=${{oc.env:{TOKEN}}}"
        idle = f"envhub.session_idle_s={2 * self._idle_s:g}"
        words = ["envhub", "port=0", token, idle, *options]
        kind = "hub of a run" if options else "hub"
        address = await self._address(kind, words)
        if address not in self._clients:
            self._clients[address] = HubClient(address, token=self._token, timeout_s=CALL_S)
        return self._clients[address]

    async def _address(
        self, kind: str, words: list[str], *, prefix: str = "hub: ", start_s: float = START_S
    ) -> str:
        """Return the address of a server process; replace one of this kind with other arguments."""
        self._upkeep = self._upkeep or asyncio.create_task(self._close_idle())
        async with self._changing:  # Of two concurrent pages, the later request wins.
            if self._words.get(kind) != words:
                if old := self._services.pop(kind, None):
                    await old.stop()
                self._words[kind] = words
                token = self._token
                self._services[kind] = ServiceCommand(
                    CODE, words, token=token, prefix=prefix, start_s=start_s
                )
            service = self._services[kind]
        return await service.address()

    def _find(self, episode_id: str) -> InteractiveEpisode:
        """Return an open episode by its id. Raises: ConfigError: it is closed."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise ConfigError("This episode is closed, because it failed or was idle for too long.")
        return episode

    async def _guarded(self, episode: InteractiveEpisode, work: Callable[[], Awaitable[T]]) -> T:
        """Run one request of an episode at a time. An error of the environment ends the episode."""
        async with episode.lock:
            episode.used_at = time.monotonic()
            try:
                return await work()
            except EnvError:
                self._episodes.pop(episode.about["id"], None)
                raise

    async def _step(
        self, episode: InteractiveEpisode, action: str, *, answer: str | None = None
    ) -> dict[str, Any]:
        """Execute an action; return the view after it."""
        if episode.is_done:
            raise ConfigError("The episode has ended. Start another one.")
        result = await episode.session.step(action)
        episode.turn, episode.is_done = episode.turn + 1, result.done
        episode.messages += [
            {"role": "assistant", "content": action if answer is None else answer},
            {"role": "user", "content": result.observation},
        ]
        outcome = {
            "action": action if answer is None else answer,
            "observation": result.observation,
            "reward": result.reward,
        }
        outcome |= {"done": result.done, "valid": result.is_valid, "success": result.is_success}
        return await self._described(episode, outcome)

    async def _described(
        self, episode: InteractiveEpisode, outcome: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the view of a page: the result, the picture and the valid actions."""
        actions = [] if episode.is_done else (await episode.session.hint()).valid_actions
        picture = await episode.session.picture()
        counts = {
            "turn": episode.turn,
            "actions": actions[:MAX_ACTIONS],
            "num_actions": len(actions),
        }
        return {**episode.about, **outcome, **counts, "picture": picture}

    async def _close_idle(self) -> None:
        """Close idle episodes and stop idle services, until cancelled."""
        while True:
            await asyncio.sleep(self._idle_s / NUM_CHECKS)
            now = time.monotonic()
            for episode_id, episode in list(self._episodes.items()):
                if now - episode.used_at > self._idle_s:
                    with contextlib.suppress(EnvError):
                        await self.close(episode_id)
                else:
                    self._services["hub"].used_at = now
            for service in [*self._services.values()]:
                await service.stop(unused_s=self._idle_s)


def _newest_checkpoint(root: Path) -> list[str]:
    """Return the override for a run's newest checkpoint; [] if it has none yet."""
    complete = [path.parent for path in root.glob("checkpoints/step-*/COMPLETE")]
    numbers = {int(number): path for path in complete if (number := path.name[5:]).isdigit()}
    return [f"model.path={numbers[max(numbers)]}"] if numbers else []
