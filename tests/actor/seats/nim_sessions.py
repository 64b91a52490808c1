"""A session of nim in this process, and players that move by a script."""

from collections.abc import Callable, Sequence
from typing import Any

from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import Act, EnvSession, Render, Turn
from common.config.actor import ActorSection, SeatsOptions
from common.wire.messages import EpisodeKind, Lease, PolicyKind
from envhub.env import Style
from envhub.envs.nim import NimEnv
from tests.actor.rollout.playing import Letters

ITEM = "OnePile-train-0"


def lease_of(
    group: str = "g", *, member: int = 0, kind: EpisodeKind = EpisodeKind.TRAIN, **more: Any
) -> Lease:
    fields: dict[str, Any] = {
        "episode_id": f"{group}/{member}",
        "group_id": group,
        "member": member,
        "attempt": 0,
        "kind": kind,
        "policy": PolicyKind.MODEL,
        "env": "nim",
        "item_id": ITEM,
        "seed": member,
        "horizon": 30,
        "horizon_stage": 0,
        "opened_at_version": 0,
        "deadline_s": 60.0,
    }
    return Lease(**{**fields, **more})


def config_of(**seats: Any) -> ActorSection:
    return ActorSection(seats=SeatsOptions(**seats))


class NimSession:
    """Has the attributes of a `HubSession`; `fails_at` is the number of a step that raises."""

    num_seats = 2
    first_seat = 0
    start_score = 0.0

    def __init__(self, *, fails_at: int = 0, error: Exception | None = None) -> None:
        self._env = NimEnv(Style.COMPACT)
        self.first_observation = self._env.reset(ITEM)
        self.first_state = self._env.state_text()
        self.first_messages: list[dict[str, str]] = []
        self.moves: list[tuple[int, str]] = []
        self.num_closed = 0
        self._seat = 0
        self._fails_at = fails_at
        self._error = error

    async def step(self, action: str) -> HubStepResult:
        self.moves.append((self._seat, action))
        if self._error is not None and len(self.moves) == self._fails_at:
            raise self._error
        result = self._env.step(action)
        self._seat = result.seat or 0
        return HubStepResult(
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            is_valid=result.is_valid,
            is_success=bool(result.is_success),
            state=result.state,
            seat=self._seat,
            seat_rewards=list(result.seat_rewards or []),
        )

    async def hint(self) -> ExpertHint:
        return ExpertHint(
            valid_actions=self._env.valid_actions(), expert_action=self._env.expert_action()
        )

    async def close(self) -> None:
        self.num_closed += 1


def saying(*texts: str) -> tuple[Act, Render]:
    """Return a policy that answers with these texts in turn, the last one again and again."""
    left = list(texts)

    async def act(ids: list[int], _: EnvSession) -> Turn:
        text = left.pop(0) if len(left) > 1 else left[0]
        ids = [*map(ord, text), 0]
        return Turn(ids, [-0.5] * len(ids), [3] * len(ids))

    return act, Letters()


def opening(sessions: Sequence[NimSession]) -> Callable[[], Any]:
    """Return a function that opens these sessions in turn."""
    left = list(sessions)

    async def open_session() -> Any:
        return left.pop(0)

    return open_session
