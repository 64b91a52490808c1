"""How the fifteen AgentGym servers differ on the wire; the table of them is dialects.yaml."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envhub.env import Style
from envhub.tables import read_table

Scalar = str | int


class Extraction(StrEnum):
    """What of the model's text is sent as the action; AgentGym's clients do this, not its servers.

    ONE_ACTION: the line after the only `Action:`, letters, digits, commas and spaces of it.
    LAST_ACTION: all that follows the last `Action:`.
    FIRST_ACTION: what follows the first `Action:`, up to a second one.
    SQL_BLOCK: the last fenced block of SQL.
    FENCED: the whole text, if it has a fenced block.
    WHOLE: the whole text.
    TOOL: the same, which names a tool and its input.
    """

    ONE_ACTION = "one_action"
    LAST_ACTION = "last_action"
    FIRST_ACTION = "first_action"
    SQL_BLOCK = "sql_block"
    FENCED = "fenced"
    WHOLE = "whole"
    TOOL = "tool"


class Faults(StrEnum):
    """How a server tells of a request it cannot serve.

    ERROR_KEY: status 200 with `{"error": text}`.
    STATUS: a status other than 200.
    OBSERVATION: status 200 with the text as the observation; "TimeoutError" for a failed reset.
    """

    ERROR_KEY = "error_key"
    STATUS = "status"
    OBSERVATION = "observation"


class ResetReply(StrEnum):
    """The JSON of a reset: an object, `[observation, null]`, or the observation by itself."""

    OBJECT = "object"
    LIST = "list"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    title: str
    instance_key: str = "id"  # names the instance's number in requests
    item_key: str  # names the data index in a reset
    reset_extra: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])  # of its request
    create_body: Mapping[str, Scalar] | None = None  # None: no body at all
    # A create takes seconds, and nothing else is answered meanwhile; so creates are asked for one
    # by one, lest they hold up the episodes.
    halts_to_create: bool = False
    is_create_bare: bool = False  # answers with the number instead of an object that holds it
    reset_reply: ResetReply = ResetReply.OBJECT
    observation_key: str = "observation"  # of a step's reply
    score_key: str = "reward"  # names a step's value that says how the episode stands
    done_key: str = "done"
    step_extra: Mapping[str, bool | None] = field(default_factory=dict[str, bool | None])  # replied
    max_score: float = 1.0  # the best value under `score_key`; rewards are divided by it
    # An episode that ends with any score above 0 is solved; else only one with `max_score` is.
    is_solved_by_any_score: bool = False
    lost_reward: float = 0.0  # what an episode that ended without success pays
    is_first_by_get: bool = False  # the first observation is asked for by GET after a reset
    extraction: Extraction
    faults: Faults = Faults.ERROR_KEY
    has_close: bool = False  # servers of before 2025-09 have none
    close_timeout_s: float = 5.0
    # Instances are dear to make or cannot be closed: a client plays many episodes in one.
    is_kept: bool = False
    refuses_after_done: bool = False  # a step after the end is an error; else it is answered
    error_before_reset: str = "{number}"  # of a step; `{number}` is the instance's
    num_items: int | None = None  # data indices below are different items; None: there is no end
    # Where no list is named: ranges (first, end, step) of test items and of training items; without
    # the latter all others are training items.
    test_items: tuple[tuple[int, ...], ...] = ()
    train_items: tuple[tuple[int, ...], ...] = ()
    max_instances: int | None = None  # more live instances than this share their state
    reuses_numbers: bool = False  # a create beyond `max_instances` gives out one that there is
    invalid_marks: tuple[str, ...] = ()  # how observations begin that refuse an action
    details: tuple[str, ...] = ()  # routes of its page, by GET, that the environment answers
    has_detail: bool = False  # GET /detail: the last reply
    has_render: bool = False  # POST /render: a picture
    moves: tuple[str, ...] = ()  # all the actions there are, when they are few
    # How observations begin otherwise; another text is that of an error, be it of the action or of
    # the server.
    sound_mark: str = ""
    instruction: Mapping[Style, str]  # what an agent is told before its first observation


def _read_dialects() -> dict[str, Dialect]:
    table = read_table(__file__, "dialects.yaml")
    kinds = {"extraction": Extraction, "faults": Faults, "reset_reply": ResetReply}
    dialects: dict[str, Dialect] = {}
    for name, entry in table["dialects"].items():
        task, answers = entry.pop("task"), table["answers"][entry["extraction"]]
        told = {style: f"{task}\n{answers[style]}".rstrip() for style in Style}
        given = {key: kinds.get(key, _frozen)(value) for key, value in entry.items()}
        dialects[name] = Dialect(name=name, instruction=told, **given)
    return dialects


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


DIALECTS = _read_dialects()
TEXTCRAFT, BABYAI, SCIWORLD = DIALECTS["textcraft"], DIALECTS["babyai"], DIALECTS["sciworld"]
ALFWORLD, MAZE, WORDLE = DIALECTS["alfworld"], DIALECTS["maze"], DIALECTS["wordle"]
SEARCHQA, WEBARENA = DIALECTS["searchqa"], DIALECTS["webarena"]
