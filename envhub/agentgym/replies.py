"""The JSON replies to AgentGym's clients, by dialect."""

import asyncio
from dataclasses import dataclass, field

from envhub.agentgym.dialects import (
    BABYAI,
    MAZE,
    SCIWORLD,
    SEARCHQA,
    TEXTCRAFT,
    WEBARENA,
    WORDLE,
    Dialect,
    Faults,
    ResetReply,
)
from envhub.conversations import CONVERSATIONS
from envhub.env import StepResult, parse_item
from envhub.envs.sciworld.catalogue import SUBSETS, variation_of


class InstanceUnknown(LookupError):
    """No such instance: never created, closed, or expired."""


class NotReset(RuntimeError):
    """The instance has no episode yet."""


class EpisodeOver(RuntimeError):
    """The instance's episode has ended, and it takes no more steps."""

    def __init__(self, number: int) -> None:
        super().__init__(f"The task with environment {number} has finished.")


@dataclass(slots=True, kw_only=True, eq=False)
class ServedInstance:
    """One instance and its current episode; `session_id` is None between episodes.

    A suspended episode has no session either: repeating the actions of `performed` restores it.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session_id: str | None = None
    item_id: str = ""  # "": there is no episode.
    performed: list[str] | None = None  # Actions so far; None: the episode cannot be suspended.
    first_observation: str = ""
    answer: StepResult | None = None
    reward: float = 0.0  # Reward of the last step, as reported.
    score: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.answer is not None and self.answer.done

    @property
    def holds_place(self) -> bool:
        """Whether it has a session, or has reserved one."""
        return self.session_id is not None or self.answer is None


Json = dict[str, object]

GOAL_MARK = "Your goal:"
START = "Let's start Wordle!"
OBSERVATION_MARK = "OBSERVATION:\n"
URL_MARK = "\nURL: "
OBJECTIVE_MARK = "OBJECTIVE:"
RESET_FAILED = "TimeoutError"  # The only sign of a failed reset that WebArena's client recognizes.


def create_reply(dialect: Dialect, number: int) -> Json | int:
    return number if dialect.is_create_bare else {dialect.instance_key: number}


def reset_reply(dialect: Dialect, number: int, instance: ServedInstance) -> Json | list | str:
    """Return the JSON that answers a reset; TextCraft's create is also a reset."""
    first = instance.first_observation
    if dialect in (MAZE, WORDLE):  # Their clients add the rest of the text.
        first = START if dialect is WORDLE else CONVERSATIONS["maze"].server_text(first)
    start: Json = {"reward": 0, "done": False}
    if dialect.reset_reply is ResetReply.TEXT:
        return first
    if dialect.reset_reply is ResetReply.LIST:
        return [first, None]
    if dialect is TEXTCRAFT:
        return {"id": number, "observation": first} | start
    if dialect is BABYAI:
        return {"observation": first, "score": 0, "deleted": False} | start
    if dialect is SCIWORLD:  # Its client joins task and room again.
        task, _, room = first.partition("\n")
        variation = variation_of(parse_item(instance.item_id, SUBSETS))
        reply: Json = {"task_name": variation.task, "var_num": variation.index}
        reply |= {"task_description": task, "observation": room}
        score = round(instance.score)
        return reply | {"reward": score, "score": score, "deleted": False, "done": False}
    if dialect is WORDLE:
        return {"id": number, "observation": first}
    if dialect is WEBARENA:
        subset = instance.item_id.partition("-")[0]
        # Without the rest of the prompt.
        page = first.removeprefix(OBSERVATION_MARK).rpartition(URL_MARK)[0]
        return {"observation": page, "sites": [subset], "object": _line_of(first, OBJECTIVE_MARK)}
    return {"observation": first}


def step_reply(dialect: Dialect, instance: ServedInstance, result: StepResult) -> Json:
    """Return the JSON that answers a step, and add its reward to the instance's score."""
    done = result.done
    reward = result.score
    if reward is None:
        reward = result.reward * dialect.max_score
    if done and not reward:
        reward = dialect.lost_reward
    reply: Json = {dialect.observation_key: result.observation, dialect.done_key: done}
    if dialect.step_extra:
        reply.update(dialect.step_extra)
    if dialect is SCIWORLD:  # The hub reports the score so far, SciWorld the increase by this step.
        previous, instance.score = instance.score, round(reward)
        reward, reply["score"] = instance.score - previous, instance.score
    elif dialect is BABYAI:
        instance.score += reward
        reply["score"] = instance.score
    # In WebArena this value states whether the action was executed.
    elif dialect is WEBARENA and not done:
        reward = float(result.is_valid)
    instance.reward = reply["reward"] = reward
    return reply


def observation_reply(dialect: Dialect, instance: ServedInstance) -> Json | str:
    """Return the JSON of GET /observation. Raises: NotReset: there is no observation yet."""
    if not instance.item_id and dialect is not BABYAI:
        raise NotReset
    first = instance.first_observation
    answer = instance.answer
    if dialect in (MAZE, WORDLE):
        first = START if dialect is WORDLE else CONVERSATIONS["maze"].server_text(first)
    if dialect is SEARCHQA:  # SearchQA always returns the question.
        return first
    last = first if answer is None else answer.observation
    if dialect is SCIWORLD and answer is None:
        return first.partition("\n")[2]  # The room without the task.
    if dialect is not BABYAI:
        return last
    if answer is not None:
        last = f"{GOAL_MARK} {_line_of(first, GOAL_MARK)}\n{last}"
    return {
        "observation": last or "Environment not initialized",
        "reward": instance.reward,
        "score": instance.score,
        "done": answer.done if answer else False,
        "deleted": False,
    }


def detail_reply(dialect: Dialect, instance: ServedInstance) -> Json:
    """Return the JSON of GET /detail, the state of the episode. Raises: NotReset."""
    if not instance.item_id:
        raise NotReset
    answer = instance.answer
    reply: Json = {"observation": observation_reply(dialect, instance), "reward": instance.reward}
    reply |= {"done": answer is not None and answer.done, "deleted": False}
    if dialect is SCIWORLD:
        variation = variation_of(parse_item(instance.item_id, SUBSETS))
        reply |= {"task_name": variation.task, "var_num": variation.index, "score": instance.score}
        reply["task_description"] = instance.first_observation.partition("\n")[0]
    return reply


def fault_reply(dialect: Dialect, text: str, *, is_reset: bool = False) -> Json:
    """Return the JSON of a refusal with status 200; not for Faults.STATUS."""
    if dialect.faults is Faults.ERROR_KEY:
        return {"error": text}
    if is_reset:
        return {"observation": RESET_FAILED, "sites": "Error", "object": "Error"}
    reply: Json = {"observation": text, "reward": 0, dialect.done_key: False}
    return reply | dict(dialect.step_extra)


def _line_of(text: str, mark: str) -> str:
    """Return the rest of the line after a mark; "" if the mark is missing."""
    return text.partition(mark)[2].partition("\n")[0].strip()
