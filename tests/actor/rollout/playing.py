"""Helpers for tests of episodes: a scripted session and a letter renderer."""

import asyncio
from collections.abc import Callable
from typing import Any

from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.episode import WHOLE, Act, EnvSession, EpisodeState, Render, Turn, run_episode
from common.config.actor import AgentOptions
from common.errors import EnvError
from common.wire.messages import EpisodeKind, Lease, PolicyKind, Trajectory

LEASE = Lease(
    episode_id="g/1",
    group_id="g",
    member=1,
    attempt=2,
    kind=EpisodeKind.TRAIN,
    policy=PolicyKind.MODEL,
    env="toy",
    item_id="toy-train-0",
    seed=7,
    horizon=3,
    horizon_stage=1,
    opened_at_version=4,
    deadline_s=60.0,
)


class Count:
    """A counting session; `answers` gives the result of each step, and the last one repeats."""

    def __init__(self, answers: list[HubStepResult | Exception | float]) -> None:
        self.first_observation = "first"
        self.first_state = ""
        self.start_score = 0.0
        self.tools: list[dict[str, Any]] = []
        self.first_messages: list[dict[str, Any]] = []
        self.actions: list[str] = []
        self.num_closed = 0
        self._answers = answers

    async def step(self, action: str) -> HubStepResult:
        self.actions.append(action)
        answer = self._answers[min(len(self.actions), len(self._answers)) - 1]
        if isinstance(answer, float | int):
            await asyncio.sleep(answer)
            raise AssertionError("slept through the deadline")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def hint(self) -> ExpertHint:
        return ExpertHint(valid_actions=["left", "right"], expert_action="jump")

    async def close(self) -> None:
        self.num_closed += 1


class Letters:
    """Renders each letter as its code; a turn ends with 0."""

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        return [ord(c) for c in "".join(before or ()) + text]

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return self.after_turn(observation, is_stopped=is_stopped)

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        return ([] if is_stopped else [0]) + [ord(c) for c in text]

    def action_text(self, token_ids: list[int]) -> str:
        return "".join(chr(i) for i in token_ids if i)


def go_on(
    *,
    reward: float = 0.0,
    is_valid: bool = True,
    done: bool = False,
    is_success: bool | None = None,
    is_truncated: bool = False,
) -> HubStepResult:
    solved = done and reward == 1.0 if is_success is None else is_success
    return HubStepResult(
        observation="ab",
        reward=reward,
        done=done,
        is_valid=is_valid,
        is_success=solved,
        is_truncated=is_truncated,
    )


TURNS = [
    Turn([120, 0], [-0.5, -0.25], [4, 4], num_prompt=5),
    Turn([121], [-1.0], [5], is_stopped=False),
    Turn([122, 0], [-2.0, -3.0], [5, 6], num_prompt=13, num_cached=9),
]


async def episode(
    session: Count | EnvError,
    act: Act,
    *,
    lease: Lease = LEASE,
    render: Render | None = None,
    instruction: str = "",
    max_tokens: int = 100,
    turn_tokens: int = 2,
    keeps_last: bool = False,
    options: AgentOptions = WHOLE,
    on_turn: Callable[[EpisodeState], None] = lambda _: None,
) -> Trajectory:
    async def open_session() -> EnvSession:
        if isinstance(session, EnvError):
            raise session
        return session

    return await run_episode(
        lease,
        open_session=open_session,
        act=act,
        render=render or Letters(),
        instruction=instruction,
        max_tokens=max_tokens,
        turn_tokens=turn_tokens,
        actor="actor-0",
        keeps_last=keeps_last,
        options=options,
        on_turn=on_turn,
    )


def play(
    session: Count,
    *,
    lease: Lease = LEASE,
    turns: list[Turn] = TURNS,
    act: Act | None = None,
    prompts: list[list[int]] | None = None,
    **how: Any,
) -> Trajectory:
    remaining = iter(turns)

    async def next_turn(ids: list[int], _: EnvSession) -> Turn:
        if prompts is not None:
            prompts.append(list(ids))
        return next(remaining)

    return asyncio.run(episode(session, act or next_turn, lease=lease, **how))


def text_of(got: Trajectory) -> str:
    return "".join(map(chr, got.token_ids.tolist()))
