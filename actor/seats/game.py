"""One session of an environment with seats, seen by the player of each seat."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from actor.rollout.env_client import ExpertHint, HubSession, HubStepResult
from common.errors import LongstrideError
from common.formats.seats import seat_metrics
from common.wire.messages import Trajectory


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
