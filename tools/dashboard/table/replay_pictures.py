"""Replays a recorded episode to get a picture of the state before each turn."""

import asyncio
from typing import Any, TypedDict

from actor.rollout.context import CUT_MARK
from actor.rollout.env_client import HubClient, HubSession, HubStepResult
from actor.rollout.episode import state_number
from common.errors import EnvError

LIMIT_S = 30.0  # Seconds for a whole episode.
SHOWN_CHARS = 400  # Maximum length of a differing observation in the problem, in characters.
CUT_WORDS = 40  # Words before the cut that are compared if the observation was cut.
SAME_SCORE = 1e-4


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
    client: HubClient, recorded: RecordedEpisode, *, limit_s: float = LIMIT_S
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
