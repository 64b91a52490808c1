"""Fills the seats of an environment that a leased episode does not play.

A lease is an episode of one seat. The stamp of its group determines the seat and the opponent, so
that the members of a group differ only by the actions that are sampled. Tokens of an opponent are
in no trajectory.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from actor.rollout.env_client import HubSession
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
from actor.seats.endpoint import NO_LIMIT, TextEpisode
from actor.seats.endpoints import OpponentEndpoint, endpoint_of_engine, endpoint_of_url
from actor.seats.engines import opponent_role, past_role
from actor.seats.game import GameOver, SeatView, SharedGame, on_failure
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
from common.errors import ConfigError, EnvError, EnvTimeout
from common.repository import ROOT
from common.wire.messages import EndReason, EpisodeKind, Lease, PolicyKind, Trajectory

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
