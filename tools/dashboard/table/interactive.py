"""Interactive episodes: a user in a browser, or a policy, acts one step at a time."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from actor.api.chat_endpoints import find_endpoint
from actor.policy import PolicySection
from actor.rollout.env_client import HubClient, HubSession
from actor.rollout.episode import ContextFull, PolicyFailed, first_text
from actor.seats.endpoint import Endpoint
from common.config.actor import AgentFormat
from common.errors import ConfigError, EnvError
from common.formats.answers import MARK, read_react, worded
from common.repository import ROOT
from tools.dashboard.table.replay_pictures import RecordedEpisode, ReplayPictures, redo
from tools.dashboard.table.service import START_S, TOKEN, ServiceCommand, options_of

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
        found = await client.request("GET", "/v1/envs", None)
        return {name: {"subsets": entry["subsets"]} for name, entry in found.items()}

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
        lease = f"envhub.session_lease_s={2 * self._idle_s:g}"
        words = ["envhub", "port=0", token, lease, *options]
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
                    ROOT, words, token=token, prefix=prefix, start_s=start_s
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
        more = {"turn": episode.turn, "actions": actions[:MAX_ACTIONS], "num_actions": len(actions)}
        return {**episode.about, **outcome, **more, "picture": picture}

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
            for each in [*self._services.values()]:
                await each.stop(unused_s=self._idle_s)


def _newest_checkpoint(root: Path) -> list[str]:
    """Return the override for a run's newest checkpoint; [] if it has none yet."""
    complete = [path.parent for path in root.glob("checkpoints/step-*/COMPLETE")]
    numbers = {int(number): path for path in complete if (number := path.name[5:]).isdigit()}
    return [f"model.path={numbers[max(numbers)]}"] if numbers else []
