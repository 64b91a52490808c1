"""A recorded episode played again, for the pictures of the states that its turns were taken in."""

import asyncio
from typing import Any, TypedDict

from actor.rollout.env_client import HubClient, HubSession, StepResult
from actor.rollout.observations import CUT_MARK
from common.errors import EnvError
from common.states import state_number

LIMIT_S = 30.0  # for a whole episode
SHOWN_CHARS = 400  # of an observation that differs
CUT_WORDS = 40  # of one that was too long for the context, compared before the cut
SAME_SCORE = 1e-4


class Recorded(TypedDict):
    """An episode as it was journalled, in texts."""

    env: str
    item: str
    style: str  # how observations were worded
    actions: list[str]
    shown: list[str]  # what the policy saw before each action, instructions and framing included
    scores: list[float]  # after each action
    states: list[int]  # that each action was taken in, see `common.states`; [0]: not told


class Redone(TypedDict):
    """Pictures of the states before each action and after the last, as far as `problem` allows."""

    pictures: list[Any]
    problem: str  # "" if all are there


async def redo(client: HubClient, recorded: Recorded, *, limit_s: float = LIMIT_S) -> Redone:
    """Play an episode again in a fresh environment, with a picture of each state.

    Where an observation, a state or a reward is another one than was recorded it stops, and says
    so: pictures from there on would be of another episode. So it does at a failure, and in time.
    """
    done: Redone = {"pictures": [], "problem": ""}
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
        done["problem"] = f"the environment cannot play it again: {error}"
    except TimeoutError:
        done["problem"] = f"playing it again takes longer than {limit_s:g} s"
    return done


async def _follow(session: HubSession, recorded: Recorded, pictures: list[Any]) -> str:
    """Add the pictures; return why there are no more, "" at the end."""
    observation, state = session.first_observation, session.first_state
    for turn, action in enumerate(recorded["actions"]):
        if problem := _difference(recorded, turn, observation, state):
            return problem
        pictures.append(await session.picture())
        result = await session.step(action)
        if problem := _other_worth(recorded, turn, result):
            return problem
        observation, state = result.observation, result.state
    pictures.append(await session.picture())
    return ""


def _difference(recorded: Recorded, turn: int, observation: str, state: str) -> str:
    """Return how a state is another one than an action was taken in; "" if it is the same."""
    shown = recorded["shown"][turn] if turn < len(recorded["shown"]) else None
    if shown is not None and not _holds(shown, observation):
        is_now, was = observation[:SHOWN_CHARS], shown.strip()[-SHOWN_CHARS:]
        return f"before turn {turn + 1} the observation is another one: {is_now!r}, not {was!r}"
    states = recorded["states"]
    if turn < len(states) and states[turn] != state_number(state or observation):
        return f"before turn {turn + 1} the environment is in another state than was recorded"
    return ""


def _other_worth(recorded: Recorded, turn: int, result: StepResult) -> str:
    scores = recorded["scores"]
    if turn < len(scores) and abs(result.reward - scores[turn]) > SAME_SCORE:
        return f"turn {turn + 1} is worth {result.reward:g} now, not {scores[turn]:g}"
    if result.done and turn + 1 < len(recorded["actions"]):
        return f"it ends after turn {turn + 1} now, not after {len(recorded['actions'])}"
    return ""


def _holds(shown: str, observation: str) -> bool:
    """Whether what a policy was shown holds an observation, whole or up to where it was cut."""
    before, cut, _ = shown.partition(CUT_MARK.partition("{")[0])
    whole, seen = " ".join(observation.split()), before.split()
    if cut:
        return " ".join(seen[-CUT_WORDS:]) in whole
    return whole in " ".join(seen)
