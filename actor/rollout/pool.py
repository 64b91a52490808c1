"""Pool of running episodes: turns leases into trajectories, one episode per slot."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from actor.agents.agents import Agents
from actor.delivery import Delivery
from actor.engine.concurrency import Concurrency, EngineLoad
from actor.formats.renderer import Renderer
from actor.rollout.episode import (
    WHOLE,
    Act,
    EnvSession,
    EpisodeState,
    OnTokens,
    Render,
    StreamingAct,
    Turn,
    part_so_far,
    run_episode,
)
from actor.rollout.hubs import Hubs
from actor.rollout.lockstep import Rounds
from actor.rollout.recording import CannotContinue, Recording, Recordings, WhyNot
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender, with_actions
from actor.seats.seats import Seats
from actor.seeds import SamplingSeeds, environment_seed
from common.config.actor import ActorSection, AtUpdate
from common.errors import EnvPaused, HubLost
from common.segments import as_fork
from common.wire.messages import EpisodeKind, Lease, PolicyKind, Trajectory

if TYPE_CHECKING:  # The import takes seconds.
    from actor.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_VANISHED = 3  # Number of times that a reachable hub may lose an episode's session.
# Number of times that an episode may lose its hub. The episode itself may be the cause.
MAX_LOST = 20
# Reported wait for the programs of `actor.agent`, which are outside of the run's roles.
FOR_AGENTS = "agents: their next request"


@dataclass(slots=True)
class WaitingFork:
    """A fork that waits until its trunk has reached its turn, then for a free slot."""

    trunk: str  # Episode id of the trunk.
    is_ready: bool = False  # It only waits for a slot.
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class PartSender:
    """Sends the turns so far of a running episode before its oldest unsent token becomes stale.

    Example (bound 3): the unsent turns have version 5. After the first turn that ends at version 7,
    all turns so far are sent: a step of the learner at version 8 is the last that accepts them.
    """

    def __init__(
        self,
        lease: Lease,
        engine: "Engine",
        delivery: Delivery,
        *,
        actor: str,
        max_lag_steps: Callable[[], int],
        num_turns: int,
    ) -> None:
        """Start before the first turn.

        Args:
            max_lag_steps: returns the learner's bound, which may change; 0: send nothing.
            num_turns: turns that a record replays; they are sent with the first one after them.
        """
        self._lease = lease
        self._engine = engine
        self._delivery = delivery
        self._actor = actor
        self._max_lag_steps = max_lag_steps
        self._num_turns = num_turns
        self._num_sent = 0  # Turns that were sent.

    def on_turn(self, play: EpisodeState) -> None:
        """Send the turns so far if their time has come."""
        bound = self._max_lag_steps()
        if not bound or play.num_turns <= self._num_turns:
            return
        unsent = play.history.tape.oldest_versions[self._num_sent : play.num_turns]
        if unsent and self._engine.version - min(unsent) >= bound - 1:
            self._num_sent = play.num_turns
            self._delivery.send_part(part_so_far(self._lease, play, actor=self._actor))


class EpisodePool:
    """The running episodes. A slot is freed when its trajectory is handed to delivery.

    Consumes: leases (`start`), the engine's load (`adapt`), revocations.
    Waits for: the hub, the engine, and a place in the delivery window.
    Unblocked by: their answers. Each has its own deadline, and a lease has one for the whole
    episode.

    Raises in `failed`: any error in an episode that is no `EnvError` ends the actor.
    """

    def __init__(
        self,
        cfg: ActorSection,
        *,
        actor: str,
        engine: "Engine",
        renderer: Renderer,
        environments: Hubs,
        delivery: Delivery,
        rounds: Rounds | None,
        keeps_last: bool = False,
        agents: Agents | None = None,
        recordings: Recordings | None = None,
        max_lag_steps: int = 0,
    ) -> None:
        """Create the pool without episodes.

        Args:
            keeps_last: see `run_episode`; it applies to training episodes.
            agents: plays the policy's episodes; None: the built-in loop does.
            recordings: the records by which episodes of the built-in loop continue after a loss;
                None: they begin anew.
            max_lag_steps: bound of `PartSender` for training episodes of the built-in loop.
        """
        self._max_lag_steps = max_lag_steps
        self._cfg = cfg
        self._actor = actor
        self._engine = engine
        self._renderer = renderer
        self._environments = environments
        self._delivery = delivery
        self._rounds = rounds
        self._keeps_last = keeps_last
        self._concurrency = Concurrency(least=cfg.min_concurrent, most=cfg.max_concurrent)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_requests = 0
        self.num_ended = 0
        self._agents = agents
        self._recordings = recordings
        self._reading = asyncio.Lock()  # Held while a record is read from its file.
        self._forks: dict[str, WaitingFork] = {}
        if recordings is not None:
            recordings.on_start = self._wake_fork
        self._seats = Seats(cfg)
        self._waiting: set[str] = set()  # Episodes that wait for a lost hub.
        self._salts: dict[str, str] = {}  # episode id -> salt of its first turn
        self.slot_freed = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def running_ids(self) -> list[str]:
        return list(self._tasks)

    @property
    def waiting_for(self) -> str:
        """The role or the programs that the episodes wait for while the engine samples no turn.

        "": they wait for nothing outside of this actor.
        """
        if not self._tasks:
            return "scheduler: leases"
        if self._waiting or self._environments.num_in_flight:
            return "envhub"
        return FOR_AGENTS if self._agents is not None else ""

    @property
    def num_free_slots(self) -> int:
        """Number of episodes that could start now."""
        return max(0, self._num_unused_slots - len(self._ready_forks))

    @property
    def _num_unused_slots(self) -> int:
        """Number of slots without an episode, below zero after a decrease."""
        return self.num_slots - len(self._tasks) + len(self._waiting) + len(self._forks)

    @property
    def num_slots(self) -> int:
        """Maximum number of concurrent episodes. After a decrease more may still be running."""
        return self._concurrency.limit

    def configure(self, cfg: ActorSection, *, max_lag_steps: int, why_not: WhyNot) -> None:
        """Use other bounds of concurrent episodes and of lags. Running episodes continue.

        Args:
            max_lag_steps: see `__init__`.
            why_not: see `Recordings`.
        """
        self._max_lag_steps = max_lag_steps
        if cfg.max_concurrent > self._cfg.max_concurrent:
            text = (
                "actor.max_concurrent=%d is above the engine's batch of %d requests, which a start"
                " sets: further requests wait in the engine"
            )
            logger.warning(text, cfg.max_concurrent, self._cfg.max_concurrent)
        if self._recordings is not None:
            self._recordings.why_not = why_not
        self._concurrency.set_bounds(least=cfg.min_concurrent, most=cfg.max_concurrent)
        self._release_slots()

    def adapt(self, load: EngineLoad) -> None:
        """Adjust the number of slots to the engine's load since the last call."""
        before = self.num_slots
        if (
            self._concurrency.adjust(load, num_episodes=len(self._tasks) - len(self._forks))
            > before
        ):
            self._release_slots()

    def start(self, leases: list[Lease]) -> None:
        """Start the leased episodes. All of them enter the round before the first one asks."""
        for lease in leases:
            if self._rounds is not None and lease.policy is PolicyKind.MODEL:
                self._rounds.enter(lease.episode_id, env=lease.env)
        for lease in leases:
            task = asyncio.create_task(self._play(lease), name=lease.episode_id)
            self._tasks[lease.episode_id] = task
            task.add_done_callback(self._free_slot)

    def revoke(self, episode_ids: list[str]) -> None:
        """Cancel episodes whose leases were revoked."""
        for episode_id in episode_ids:
            if (task := self._tasks.get(episode_id)) is not None:
                logger.info("revoked episode=%s", episode_id)
                task.cancel()
                if self._recordings is not None:
                    self._recordings.abandon(episode_id)

    async def cancel_all(self, *, is_run_over: bool = False) -> None:
        """Cancel all episodes, and stop the agents. The records stay unless the run is over."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._agents is not None:
            await self._agents.close()
        await self._seats.close()
        if is_run_over and self._recordings is not None:
            self._recordings.drop_all()

    def _free_slot(self, task: asyncio.Task[None]) -> None:
        """Free the slot of an ended episode, and record its failure."""
        self._tasks.pop(task.get_name(), None)
        self.num_ended += 1
        self._salts.pop(task.get_name(), None)
        if self._rounds is not None:
            self._rounds.leave(task.get_name())
        for fork in list(self._forks):
            if self._forks[fork].trunk == task.get_name():
                self._wake_fork(fork)
        self._release_slots()
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def _play(self, lease: Lease) -> None:
        """Play a leased episode, and hand the trajectory to delivery."""
        await self._wait_for_trunk(lease)
        if self._rounds is not None:
            await self._rounds.begun(lease.episode_id)
        trajectory = await self._play_to_end(lease)
        if self._rounds is not None:
            self._rounds.leave(lease.episode_id)
        await self._delivery.put(trajectory)

    async def _wait_for_trunk(self, lease: Lease) -> None:
        """Wait until a fork can begin and has a slot. It uses no slot meanwhile.

        Without a trunk that plays here, or reaches its turn, it plays from its first turn.
        """
        recordings = self._recordings
        if recordings is None or not (trunk := recordings.trunk_of(lease)):
            return
        name = lease.episode_id
        fork = self._forks[name] = WaitingFork(trunk)
        self._release_slots()
        try:
            while not recordings.has_start(name) and trunk in self._tasks:
                fork.changed.clear()
                await fork.changed.wait()
            if not recordings.has_start(name):
                logger.info("fork plays from its first turn episode=%s trunk=%s", name, trunk)
            fork.is_ready = True
            fork.changed.clear()
            self._release_slots()
            while name in self._forks:
                await fork.changed.wait()
                fork.changed.clear()
        finally:
            self._forks.pop(name, None)

    def _wake_fork(self, episode_id: str) -> None:
        """Let a fork check again whether it can begin."""
        if (fork := self._forks.get(episode_id)) is not None:
            fork.changed.set()

    @property
    def _ready_forks(self) -> list[str]:
        return [name for name, fork in self._forks.items() if fork.is_ready]

    def _release_slots(self) -> None:
        """Give unused slots to forks, then to new leases."""
        for name in self._ready_forks[: max(0, self._num_unused_slots)]:
            self._forks.pop(name).changed.set()
        self.slot_freed.set()

    async def _play_to_end(self, lease: Lease) -> Trajectory:
        """Play an episode. When its hub is lost, continue it in another session.

        It continues by its record. It begins anew without one, or if the record does not fit. Lost
        attempts are not counted. An episode that waits for a hub frees its slot, and the wait does
        not count towards its deadline. The episode fails if a hub that answers loses its session
        too often, or if it loses its hubs too often without a step between. It also fails if its
        environment has had no hub for as long as an episode may take. It waits without limit while
        a hub has paused its environment, because a service that it needs is down.
        """
        num_lost = num_vanished = num_steps = 0
        recording = await self._begin_recording(lease)
        while True:
            if recording is not None:
                async with self._reading:
                    await asyncio.sleep(0)
                    recording = recording.usable()
                if recording.events.num_steps > num_steps:  # The episode is not the cause.
                    num_lost = num_vanished = 0
                num_steps = recording.events.num_steps
            is_last = num_vanished > MAX_VANISHED or num_lost > MAX_LOST
            is_last = is_last or self._environments.is_gone(lease.env)
            try:
                return await self._play_once(lease, recording, may_repeat=not is_last)
            except CannotContinue as error:
                assert recording is not None
                recording = recording.renewed(str(error))
                num_steps = 0
                continue
            except EnvPaused as error:
                logger.debug("episode waits episode=%s reason=%s", lease.episode_id, error)
                self._environments.pause(lease.env, error)
            except HubLost as error:
                num_lost += 1
                num_vanished += not self._environments.is_lost(lease.env)
                logger.info("restarting episode=%s reason=%s", lease.episode_id, error)
            self._waiting.add(lease.episode_id)
            self._release_slots()
            try:
                await self._environments.wait_for(lease.env)
            finally:
                self._waiting.discard(lease.episode_id)

    async def _begin_recording(self, lease: Lease) -> Recording | None:
        """Return the record of an episode; None if it begins anew after a loss.

        The records of many long episodes are read one by one. Heartbeats are sent between them.
        """
        is_by_agent = self._agents is not None
        if self._recordings is None or is_by_agent or lease.policy is not PolicyKind.MODEL:
            return None
        async with self._reading:
            await asyncio.sleep(0)
            return self._recordings.begin(lease)

    async def _play_once(
        self, lease: Lease, recording: Recording | None, *, may_repeat: bool
    ) -> Trajectory:
        """Play one attempt at an episode, in the built-in loop or by an agent."""
        num_requests = 0 if recording is None else recording.events.num_turns
        num_turns = 0 if recording is None else recording.events.num_steps
        act, render = self._policy(lease, num_requests=num_requests)
        hubs = self._environments
        seed = environment_seed(lease)
        open_session = partial(hubs.open, lease.env, lease.item_id, seed=seed)
        aside: dict[str, Callable[[], None]] = {}
        if self._rounds is not None:
            aside["step_aside"] = partial(self._rounds.step_aside, lease.episode_id)
            open_session = partial(open_session, on_full=aside["step_aside"])
        task = hubs.instruction(lease.env), hubs.acknowledgement(lease.env)
        open_session = self._seats.opener(
            lease,
            open_session,
            make_policy=self._policy,
            task=task,
            texts=hubs.opponent_texts(lease.env),
        )
        if self._agents is not None and lease.policy is PolicyKind.MODEL:
            return await self._agents.play(
                lease,
                open_session=open_session,
                act=self._model_act(lease),
                task=task,
                may_repeat=may_repeat,
                **aside,
            )
        if recording is not None:
            open_session, act = recording.replay(open_session, act)
        played = await run_episode(
            lease,
            open_session=open_session,
            act=act,
            render=render,
            instruction=task[0],
            acknowledgement=task[1],
            max_tokens=self._cfg.max_model_len,
            turn_tokens=self._cfg.max_turn_tokens,
            actor=self._actor,
            may_repeat=may_repeat,
            keeps_last=self._keeps_last and lease.kind is EpisodeKind.TRAIN,
            options=self._cfg if lease.policy is PolicyKind.MODEL else WHOLE,
            on_turn=self._part_sender(lease, num_turns=num_turns).on_turn,
        )
        if recording is not None and recording.events.num_shared:
            played = as_fork(
                played, trunk=recording.events.trunk, num_shared_turns=recording.events.num_shared
            )
        return with_actions(played, render)

    def _part_sender(self, lease: Lease, *, num_turns: int) -> PartSender:
        """Return the sender of an episode's parts; it sends none for an evaluation."""
        return PartSender(
            lease,
            self._engine,
            self._delivery,
            actor=self._actor,
            max_lag_steps=lambda: self._max_lag_steps if lease.kind is EpisodeKind.TRAIN else 0,
            num_turns=num_turns,
        )

    def _policy(self, lease: Lease, *, num_requests: int = 0) -> tuple[Act, Render]:
        """Return the policy of a lease and its renderer: the model, or a scripted policy.

        Args:
            num_requests: answers of the episode that were sampled before.
        """
        if lease.policy is not PolicyKind.MODEL:
            scripted = ScriptedRender()
            policy = ScriptedPolicy(lease.policy, seed=lease.episode_id, render=scripted)
            return policy.act, scripted
        render = self._renderer.of(lease.env, self._environments.tools(lease.env))
        return self._model_act(lease, num_requests=num_requests), render

    def _model_act(self, lease: Lease, *, num_requests: int = 0) -> StreamingAct:
        """Return the function that samples the turns of an episode; see `_policy`."""
        seeds = SamplingSeeds(lease, num_requests=num_requests)

        def act(
            ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None
        ) -> Awaitable[Turn]:
            return self._act(lease, ids, seed=seeds.next(), on_tokens=on_tokens)

        return act

    async def _act(
        self, lease: Lease, ids: list[int], *, seed: int, on_tokens: OnTokens | None
    ) -> Turn:
        """Sample one turn of an episode, in a round or by itself. A round reports no tokens."""
        if self._rounds is not None:
            return await self._rounds.act(lease.episode_id, ids, seed=seed)
        self._num_requests += 1
        frozen_s = self._engine.frozen_s
        taken = await self._engine.generate(
            ids,
            request_id=f"{lease.episode_id}:{lease.attempt}:{self._num_requests}",
            max_tokens=self._cfg.max_turn_tokens,
            salt=lambda: self._salt(lease.episode_id),
            seed=seed,
            on_tokens=on_tokens,
        )
        waited_s = self._engine.frozen_s - frozen_s
        return replace(taken, waited_s=waited_s) if waited_s else taken

    def _salt(self, episode_id: str) -> str:
        """Return the prefix-cache salt of an episode's next turn: a version of the weights.

        By default it is the engine's current version, so that prefixes computed by older weights
        are not reused. If prefixes are kept at an update, it is the version of the episode's first
        turn. Then an episode never reuses prefixes that are older than itself.
        """
        current = f"v{self._engine.version}"
        if self._cfg.prefixes_at_update is AtUpdate.DROP:
            return current
        return self._salts.setdefault(episode_id, current)
