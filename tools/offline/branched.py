"""Demonstrations with branches, for a policy that is to learn to open and close its own.

The scripted policy (`actor.rollout.scripted`) opens a branch whenever it is in none. It acts in the
branch for half of `actor.branch_turns` and then returns. A trained policy may therefore need more
turns than the demonstration. A call names the next action and a return the latest one. They
demonstrate the form of a branch, not where one is useful. A branch without a return is ended by its
limit, and the demonstration contains the note about it.
"""

from functools import partial
from typing import Any

from actor.rollout.context import Turn
from actor.rollout.env_client import Environments
from actor.rollout.episode import EnvSession, run_episode
from actor.rollout.folding import CALL, RETURN
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from actor.seats.seats import Seats
from common.config.actor import ActorSection, AgentFormat, AgentOptions, SeatsOptions
from common.errors import ConfigError, EnvError
from common.formats.answers import in_react
from common.segments import as_rows
from tools.evaluate.play import PlannedEpisode, lease_of

# Token limit that is never reached. Training cuts segments that are too long for it.
NO_END = 10**6
DEADLINE_S = 600.0


class MessageRender(ScriptedRender):
    """Encodes each message as one token, so that the tokens of a segment identify its messages."""

    def __init__(self) -> None:
        super().__init__()
        self._observed: set[int] = set()

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        if before is None:
            return self._add_observation(text)
        return [
            *self._add_observation(before[0]),
            *self.add(before[1]),
            *self._add_observation(text),
        ]

    def opened(self, messages: list[dict[str, str]], text: str) -> list[int]:
        """Return the tokens of messages and a user's message after them."""
        shown = {True: self.add, False: self._add_observation}
        before = [shown[each["role"] == "assistant"](each["content"]) for each in messages]
        return [*(token for ids in before for token in ids), *self._add_observation(text)]

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return self._add_observation(observation)

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        return self._add_observation(text)

    def _add_observation(self, text: str) -> list[int]:
        """Return the ids of an observation, which the policy does not sample."""
        ids = self.add(text)
        self._observed.update(ids)
        return ids

    def message(self, token_id: int, *, is_learnt: bool) -> dict[str, Any]:
        """Return the message of a token in AgentGym's format."""
        text = self.action_text([token_id])
        if token_id in self._observed:
            return {"from": "human", "loss": None, "value": text}
        return {"from": "gpt", "loss": is_learnt, "value": text}


class BranchingPolicy:
    """Plays a scripted policy's actions in branches of half the allowed turns."""

    def __init__(
        self,
        policy: ScriptedPolicy,
        render: ScriptedRender,
        *,
        options: AgentOptions,
        unreturned: int = -1,
    ) -> None:
        """Begin outside of branches. The branch with the number `unreturned` gets no return."""
        self._policy = policy
        self._render = render
        self._most = options.branch_turns
        self._form = options.format
        self._unreturned = unreturned
        self._num_calls = 0
        self._next: Turn | None = None  # The action that the call named.
        self._latest = ""
        self._num_left = -1  # Turns left in the branch; -1: in no branch.

    async def act(self, ids: list[int], session: EnvSession) -> Turn:
        """Return the next action, or the call or return of a branch. Raises: EnvError."""
        if self._num_left == 0:
            self._num_left = -1
            # Equal: the branch has just been ended by its limit.
            if self._num_calls != self._unreturned + 1:
                return self._scripted_turn(f"<{RETURN}>{self._latest}</{RETURN}>")
        taken = self._next or await self._policy.act(ids, session)
        text = self._render.action_text(taken.token_ids)
        if self._num_left < 0:
            is_left = self._num_calls == self._unreturned
            self._num_calls += 1
            self._next = taken
            self._num_left = self._most if is_left else self._most // 2
            return self._scripted_turn(f"<{CALL}>{text}</{CALL}>")
        self._next = None
        self._latest = text
        self._num_left -= 1
        return self._scripted_turn(in_react(text) if self._form is AgentFormat.REACT else text)

    def _scripted_turn(self, text: str) -> Turn:
        return Turn(self._render.add(text), logprobs=[0.0], versions=[-1])


async def open_beside_random(
    environments: Environments, plan: PlannedEpisode, trained: list[int]
) -> EnvSession:
    """Return a session for a demonstration. In a game with seats, the other seats play at random.

    Args:
        trained: the seats that demonstrations play; [] means all.

    Raises: EnvError, EnvTimeout.
    """
    seats = Seats(ActorSection(seats=SeatsOptions(trained=trained)))
    lease = lease_of(plan, attempt=0, deadline_s=DEADLINE_S)
    scripted = ScriptedRender()
    policy = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=scripted)
    open_seat = seats.opener(
        lease,
        partial(environments.open, plan.env, plan.item_id, seed=plan.seed),
        own=lambda _: (policy.act, scripted),
        task=("", ""),
        texts={},
    )
    return await open_seat()


async def play_in_branches(
    environments: Environments, plan: PlannedEpisode, options: AgentOptions, unreturned: int = -1
) -> tuple[list[dict[str, Any]], bool]:
    """Return an episode's segments in AgentGym's format, and whether it was solved.

    Args:
        unreturned: number of the branch without a return; -1: all branches return.

    Raises: ConfigError: `branch_turns` is below 2; EnvError: the hub failed.
    """
    if options.branch_turns < 2:
        raise ConfigError(
            f"actor.branch_turns={options.branch_turns}: demonstrated branches need at least 2"
        )
    render = MessageRender()
    scripted = ScriptedPolicy(plan.policy, seed=plan.episode_id, render=render)
    policy = BranchingPolicy(scripted, render, options=options, unreturned=unreturned)
    played = await run_episode(
        lease_of(plan, attempt=0, deadline_s=DEADLINE_S),
        open_session=lambda: open_beside_random(environments, plan, options.seats.trained),
        act=policy.act,
        render=render,
        instruction=environments.instruction(plan.env),
        acknowledgement=environments.acknowledgement(plan.env),
        max_tokens=NO_END,
        turn_tokens=1,
        actor="demonstration",
        options=options,
    )
    if played.end_reason.is_infrastructure_failure:
        raise EnvError(f"{plan.item_id}: {played.end_reason.value}: {played.error}")
    records: list[dict[str, Any]] = []
    for row in as_rows(played):
        tokens = zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True)
        messages = [render.message(token, is_learnt=learnt) for token, learnt in tokens]
        records.append(
            {"conversations": messages, "item_id": plan.item_id, "reward": played.reward}
        )
    return records, played.is_success
