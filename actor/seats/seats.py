"""Fills the seats of an environment that a leased episode does not play.

A lease is an episode of one seat. The stamp of its group determines the seat and the opponent, so
that the members of a group differ only by the actions that are sampled. Tokens of an opponent are
in no trajectory.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from actor.policy import PolicySection
from actor.rollout.env_client import ExpertHint, HubSession, HubStepResult
from actor.rollout.episode import (
    WHOLE,
    Act,
    EnvSession,
    OpenSession,
    PolicyFailed,
    Render,
    run_episode,
)
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from actor.seats.endpoint import NO_LIMIT, Endpoint, Reply, TextEpisode
from actor.seats.engines import KEY_VARIABLE, RUN_VARIABLE, opponent_role, past_role
from actor.seeds import draw_seed, environment_seed
from common.config.actor import (
    ENDPOINT,
    EXPERT,
    NAMED,
    PAST,
    RANDOM,
    SELF,
    ActorSection,
    AgentFormat,
    AgentOptions,
)
from common.config.horizon import HorizonUnit
from common.config.load import style_of_model
from common.errors import ConfigError, EnvError, EnvTimeout, LongstrideError
from common.formats.seats import seat_metrics
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.messages import EndReason, EpisodeKind, Lease, PolicyKind, Trajectory

logger = logging.getLogger(__name__)


class GameOver(LongstrideError):
    """The game ended before this seat moved for the first time."""


class SharedGame:
    """A session whose seats are played by different tasks of one event loop.

    Example: seat 0 moves. Its task waits until the hub names seat 0 again. The answer names seat 1,
    so the task of seat 1 gets the observation and moves. The game ends by its move: both tasks get
    the last observation, each with the reward of its own seat. If the task of seat 1 fails instead,
    the task of seat 0 raises the same error.
    """

    def __init__(self, session: HubSession, number: int) -> None:
        """Begin at the first move. `number` counts the games of an episode, from 0 on."""
        self.session = session
        self.number = number
        self.seat = session.first_seat  # The seat that moves next.
        self.result: HubStepResult | None = None  # Result of the last move.
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._players: list[asyncio.Task[Trajectory]] = []

    @property
    def is_over(self) -> bool:
        """True if the last move ended the game."""
        return self.result is not None and self.result.done

    async def wait_for(self, seat: int) -> None:
        """Wait until a seat moves or the game is over. Raises: the error of another player."""
        while self._failure is None and not self.is_over and self.seat != seat:
            await self._changed.wait()
        if self._failure is not None and not self.is_over:
            raise self._failure

    async def move(self, action: str) -> HubStepResult:
        """Perform the action of the seat that moves. Raises: EnvError, EnvTimeout."""
        result = await self.session.step(action)
        self.result = result
        self.seat = result.seat
        self._notify()
        return result

    def fail(self, error: BaseException) -> None:
        """End the game with an error, which all waiting players raise."""
        self._failure = self._failure or error
        self._notify()

    def add_player(self, player: asyncio.Task[Trajectory]) -> None:
        """Cancel a player's task when the game closes."""
        self._players.append(player)

    async def close(self) -> None:
        """Cancel the other players, then close the session."""
        for player in self._players:
            player.cancel()
        await asyncio.gather(*self._players, return_exceptions=True)
        await self.session.close()

    def _notify(self) -> None:
        """Wake all waiting players."""
        self._changed.set()
        self._changed = asyncio.Event()


class SeatView:
    """A game as the session of one seat. It is an `EnvSession` of `actor.rollout.episode`."""

    def __init__(self, game: SharedGame, seat: int, *, is_owner: bool, label: str = "") -> None:
        """Use `SeatView.of`, which waits for the first observation.

        Args:
            is_owner: closing the view closes the game.
            label: names the opponent in the metrics.
        """
        self._game = game
        self._seat = seat
        self._is_owner = is_owner
        self._label = label
        session = game.session
        latest = game.result
        self.first_observation = latest.observation if latest else session.first_observation
        self.first_state = latest.state if latest else session.first_state
        self.start_score = session.start_score
        self.first_messages = session.first_messages

    @classmethod
    async def of(
        cls, game: SharedGame, seat: int, *, is_owner: bool = False, label: str = ""
    ) -> "SeatView":
        """Return the view of a seat at its first move. Raises: GameOver; and as `wait_for`."""
        await game.wait_for(seat)
        if game.is_over:
            raise GameOver(f"the game ended before the first move of seat {seat}")
        return cls(game, seat, is_owner=is_owner, label=label)

    async def step(self, action: str) -> HubStepResult:
        """Move, and return the result at this seat's next move or at the end of the game."""
        moved = await self._game.move(action)
        await self._game.wait_for(self._seat)
        latest = self._game.result or moved
        reward = latest.seat_rewards[self._seat]
        return replace(
            latest,
            reward=reward,
            is_valid=moved.is_valid,
            is_success=latest.done and reward >= 1.0,
            metrics={**latest.metrics, **seat_metrics(self._seat, self._label, reward)},
        )

    async def hint(self) -> ExpertHint:
        """Return the hint for the seat that moves. Raises: EnvError, EnvTimeout."""
        return await self._game.session.hint()

    async def close(self) -> None:
        """Close the game if this view owns it."""
        if self._is_owner:
            await self._game.close()


def on_failure(
    game: SharedGame, failure_of: Callable[[asyncio.Task[Trajectory]], BaseException | None]
) -> Callable[[asyncio.Task[Trajectory]], None]:
    """Return the callback for the end of a player's task: its failure ends the game."""

    def ended(task: asyncio.Task[Trajectory]) -> None:
        if task.cancelled():
            return
        if (error := failure_of(task)) is not None:
            game.fail(error)

    return ended


SECTION = "actor.seats"  # Errors name its keys.
POLL_S = 0.5  # Seconds between two searches for an engine's address.
WARN_EVERY_S = 30.0
MAX_BACKOFF_S = 30.0  # Longest wait after a failed request to an engine of the run.


@dataclass(slots=True)
class OpponentEndpoint:
    """A chat endpoint whose address may change: an engine of the run gets one at each start."""

    settings: PolicySection  # Without the URL.
    key: str
    name: str  # The opponent as the configuration names it.
    find_url: Callable[[], str]  # Base URL with /v1; "" while there is none.
    start_timeout_s: float
    num_rounds: int = 1  # Times that the address is searched again after a failure.
    _by_url: dict[str, Endpoint] = field(default_factory=dict[str, Endpoint])

    async def complete(self, messages: list[dict[str, str]]) -> Reply:
        """Return the next message. Raises: ContextFull, PolicyFailed, ConfigError."""
        for number in range(1, self.num_rounds + 1):
            endpoint = await self._at(await self._wait_for_url())
            try:
                return await endpoint.complete(messages)
            except PolicyFailed:
                if number == self.num_rounds:
                    raise
                await asyncio.sleep(min(MAX_BACKOFF_S, 2.0 ** (number - 1)))
        raise AssertionError("num_rounds is at least 1")

    async def _at(self, url: str) -> Endpoint:
        """Return the connections to an address."""
        if url not in self._by_url:
            settings = replace(self.settings, url=url)
            self._by_url[url] = Endpoint(settings, key=self.key, section=SECTION)
        return self._by_url[url]

    async def _wait_for_url(self) -> str:
        """Return the address once there is one. Raises: PolicyFailed: there is none in time."""
        started = time.monotonic()
        warned_at = started
        while not (url := self.find_url()):
            now = time.monotonic()
            if now - started > self.start_timeout_s:
                raise PolicyFailed(
                    f"the engine of the opponent {self.name} did not start within"
                    f" actor.start_timeout_s={self.start_timeout_s:g}"
                )
            if now - warned_at > WARN_EVERY_S:
                warned_at = now
                logger.warning("still waiting for the engine of opponent=%s", self.name)
            await asyncio.sleep(POLL_S)
        return url

    async def close(self) -> None:
        """Close the connections."""
        endpoints = list(self._by_url.values())
        self._by_url.clear()
        for endpoint in endpoints:
            await endpoint.close()


def _settings(cfg: ActorSection, *, model: str, max_tries: int) -> PolicySection:
    """Return the settings of requests to an opponent."""
    return PolicySection(
        model=model,
        temperature=cfg.temperature,
        max_turn_tokens=cfg.max_turn_tokens,
        timeout_s=cfg.seats.timeout_s,
        max_tries=max_tries,
    )


def endpoint_of_url(cfg: ActorSection) -> OpponentEndpoint:
    """Return the endpoint at `actor.seats.url`. Raises: ConfigError: its key is not set."""
    seats = cfg.seats
    key = os.environ.get(seats.api_key_env, "").strip() if seats.api_key_env else ""
    if seats.api_key_env and not key:
        raise ConfigError(
            f"{SECTION}.api_key_env={seats.api_key_env}: the environment of the actor has no"
            " variable of this name. Set it to the key of the endpoint"
        )
    settings = _settings(cfg, model=seats.model, max_tries=seats.max_tries)
    return OpponentEndpoint(settings, key, "url", lambda: seats.url, cfg.start_timeout_s)


def endpoint_of_engine(cfg: ActorSection, role: str, name: str) -> OpponentEndpoint:
    """Return the endpoint of an engine that the run starts for an opponent.

    Raises: ConfigError: this process does not belong to a run that started the engine.
    """
    root = os.environ.get(RUN_VARIABLE, "")
    key = os.environ.get(KEY_VARIABLE, "")
    if not root or not key:
        raise ConfigError(
            f"{SECTION}: the opponent {name} has an engine that only `python run.py train` and"
            " `python run.py eval` start, for actors on the same machine. For other actors serve"
            f" its folder with `python run.py serve` and set {SECTION}.url"
        )
    run_dir = RunDir(root=Path(root))
    return OpponentEndpoint(
        _settings(cfg, model="", max_tries=1),
        key,
        name,
        lambda: run_dir.find_address(role) or "",
        cfg.start_timeout_s,
        num_rounds=cfg.seats.max_tries,
    )


MAX_EMPTY_GAMES = 20  # Games in a row that end before the leased seat has moved.
MAX_TURNS = 100_000  # Turns of an opponent; the deadline of the leased episode ends it before.

OpenHub = Callable[[], Awaitable[HubSession]]
MakePolicy = Callable[[Lease], tuple[Act, Render]]
Task = tuple[str, str]  # The environment's instruction, and the agent's acknowledgement of it.


class Seats:
    """The players of the seats beside a leased episode's own. For one event loop."""

    def __init__(self, cfg: ActorSection) -> None:
        self._cfg = cfg
        self._endpoints: dict[str, OpponentEndpoint] = {}

    def opener(
        self,
        lease: Lease,
        open_session: OpenHub,
        *,
        make_policy: MakePolicy,
        task: Task,
        texts: Mapping[str, str],
    ) -> OpenSession:
        """Return a function that opens the session of a lease, as the session of its seat.

        A session without seats is returned unchanged.

        Args:
            make_policy: returns the current policy for a lease, for the opponent `self`.
            texts: the instruction of each style, for opponents with other prompts than the policy.
        """

        async def open_seat() -> EnvSession:
            for number in range(MAX_EMPTY_GAMES):
                session = await open_session()
                if getattr(session, "num_seats", 1) == 1:
                    return session
                with contextlib.suppress(GameOver):
                    game = SharedGame(session, number)
                    return await self._open_view(game, lease, make_policy, task, texts)
            raise EnvError(
                f"{MAX_EMPTY_GAMES} games of {lease.env} in a row ended before the seat of the"
                " episode moved. Its opponent may make illegal moves only"
            )

        return open_seat

    async def close(self) -> None:
        """Close the connections to opponents."""
        for endpoint in self._endpoints.values():
            await endpoint.close()

    async def _open_view(
        self,
        game: SharedGame,
        lease: Lease,
        make_policy: MakePolicy,
        task: Task,
        texts: Mapping[str, str],
    ) -> SeatView:
        """Start the opponents, and return the view of the leased seat at its first move."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(game.close)
            num_seats = game.session.num_seats
            seat = seat_of(lease, self._cfg.seats.trained, num_seats)
            opponent = opponent_of(lease, self._opponents(lease))
            task = task_of(opponent, task, texts)
            for other in range(num_seats):
                if other != seat:
                    self._start_player(game, other, opponent, lease, make_policy, task)
            label = opponent if opponent in NAMED else f"folder_{self._number_of(opponent)}"
            view = await SeatView.of(game, seat, is_owner=True, label=label)
            undo.pop_all()
        return view

    def _opponents(self, lease: Lease) -> list[str]:
        """Return the opponents of a lease's kind."""
        seats = self._cfg.seats
        return seats.opponents if lease.kind is EpisodeKind.TRAIN else seats.eval_opponents

    def _start_player(
        self,
        game: SharedGame,
        seat: int,
        opponent: str,
        lease: Lease,
        make_policy: MakePolicy,
        task: Task,
    ) -> None:
        """Start the task that plays another seat."""
        played = lease_of_opponent(lease, seat, game.number)
        act, render = self._policy(opponent, played, make_policy)
        is_text = isinstance(render, TextEpisode)
        options: AgentOptions = self._cfg.of_text() if is_text else self._cfg
        if is_text and options.format is AgentFormat.FUNCTION_CALL:
            options = replace(options, format=AgentFormat.PLAIN)
        play = run_episode(
            played,
            open_session=partial(SeatView.of, game, seat),
            act=act,
            render=render,
            instruction=task[0],
            acknowledgement=task[1],
            max_tokens=NO_LIMIT if is_text else self._cfg.max_model_len,
            turn_tokens=0 if is_text else self._cfg.max_turn_tokens,
            actor="opponent",
            may_repeat=True,
            options=WHOLE if isinstance(render, ScriptedRender) else options,
        )
        who = f"the opponent {opponent} in seat {seat}"
        player = asyncio.create_task(play, name=f"{lease.episode_id} seat {seat}")
        player.add_done_callback(on_failure(game, partial(failure_of, game, who)))
        game.add_player(player)

    def _policy(self, opponent: str, lease: Lease, make_policy: MakePolicy) -> tuple[Act, Render]:
        """Return the policy of an opponent. Raises: ConfigError: it has no endpoint here."""
        if opponent == SELF:
            return make_policy(lease)
        if opponent in (RANDOM, EXPERT):
            kind = PolicyKind.EXPERT if opponent == EXPERT else PolicyKind.RANDOM_VALID
            render = ScriptedRender()
            seed = f"{lease.episode_id}/{lease.seed}"
            return ScriptedPolicy(kind, seed=seed, render=render).act, render
        episode = TextEpisode(self._endpoint(opponent, lease))
        return episode.act, episode

    def _endpoint(self, opponent: str, lease: Lease) -> OpponentEndpoint:
        """Return the endpoint of an opponent. Raises: ConfigError."""
        role = ENDPOINT
        if opponent == PAST:
            role = past_role(_draw("past", lease) % self._cfg.seats.num_past)
        elif opponent != ENDPOINT:
            role = opponent_role(self._number_of(opponent))
        if role not in self._endpoints:
            self._endpoints[role] = (
                endpoint_of_url(self._cfg)
                if role == ENDPOINT
                else endpoint_of_engine(self._cfg, role, opponent)
            )
        return self._endpoints[role]

    def _number_of(self, folder: str) -> int:
        """Return the number of an opponent's engine."""
        return self._cfg.seats.folders().index(folder)


def seat_of(lease: Lease, trained: list[int], num_seats: int) -> int:
    """Return the seat of a lease: equal for all members of a group, and for repeated attempts.

    Example: 16 groups of nim with trained=[] are about 8 groups of seat 0 and 8 of seat 1.

    Raises: ConfigError: the environment has no such seat.
    """
    if wrong := [seat for seat in trained if seat >= num_seats]:
        raise ConfigError(
            f"actor.seats.trained={trained}: {lease.env} has the seats 0 to {num_seats - 1},"
            f" not {wrong[0]}"
        )
    seats = sorted({*trained}) or range(num_seats)
    return seats[_draw("seat", lease) % len(seats)]


def opponent_of(lease: Lease, opponents: list[str]) -> str:
    """Return the opponent of a lease: equal for all members of a group."""
    return opponents[_draw("opponent", lease) % len(opponents)]


def _draw(word: str, lease: Lease) -> int:
    """Return a number from the stamp of a lease's group, or from its item and sample."""
    return draw_seed(word, environment_seed(lease), lease.item_id)


def task_of(opponent: str, task: Task, texts: Mapping[str, str]) -> Task:
    """Return the instruction for an opponent.

    A model that the run did not train gets the instruction of its own `prompt_style`.

    Args:
        task: the instruction of the policy.
        texts: the instruction of each style.
    """
    if opponent != ENDPOINT and opponent in NAMED:
        return task
    style = "instructed" if opponent == ENDPOINT else style_of_model(ROOT / opponent)
    return (texts[style], "") if style in texts else task


def lease_of_opponent(lease: Lease, seat: int, number: int) -> Lease:
    """Return the lease under which another seat is played, with sampling seeds of its own.

    Args:
        number: games of this episode that ended before its own seat moved. They are not repeated.
    """
    return replace(
        lease,
        seed=draw_seed("opponent", lease.seed, seat, number),
        policy=PolicyKind.MODEL,
        horizon=MAX_TURNS,
        horizon_unit=HorizonUnit.TURNS,
        max_turns=0,
        deadline_s=2 * lease.deadline_s,  # The leased episode reaches its own deadline first.
    )


def failure_of(
    game: SharedGame, who: str, player: asyncio.Task[Trajectory]
) -> BaseException | None:
    """Return the error by which a player's end fails the game; None if the game is over.

    An opponent that is down is a failure of the infrastructure, and so is one whose context is
    full: the leased episode could not be played to its end, so it has no reward.
    """
    error = player.exception()
    if error is not None:
        return None if isinstance(error, GameOver) else error
    played = player.result()
    if game.is_over and not played.end_reason.is_infrastructure_failure:
        return None
    text = f"{who} ended as {played.end_reason.value}: {played.error or 'its own limit'}"
    if played.end_reason is EndReason.ENV_TIMEOUT:
        return EnvTimeout(text)
    if played.end_reason is EndReason.ENV_ERROR:
        return EnvError(text)
    return PolicyFailed(text)
