"""Protocol differences of the fifteen AgentGym servers; `dialects.yaml` holds their table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envhub.env import Style
from envhub.tables import read_table

Scalar = str | int


class Extraction(StrEnum):
    """How the action is extracted from the model's text, as AgentGym's clients do before sending.

    ONE_ACTION: the line after the only `Action:`; only letters, digits, commas and spaces are kept.
    LAST_ACTION: the text after the last `Action:`.
    FIRST_ACTION: the text after the first `Action:`, up to a second one.
    SQL_BLOCK: the last fenced block of SQL.
    FENCED: the whole text, if it has a fenced block.
    WHOLE: the whole text.
    TOOL: the whole text, which names a tool and its input.
    """

    ONE_ACTION = "one_action"
    LAST_ACTION = "last_action"
    FIRST_ACTION = "first_action"
    SQL_BLOCK = "sql_block"
    FENCED = "fenced"
    WHOLE = "whole"
    TOOL = "tool"


class Faults(StrEnum):
    """How a server reports a request that it cannot serve.

    ERROR_KEY: status 200 with `{"error": text}`.
    STATUS: a status other than 200.
    OBSERVATION: status 200 with the text as the observation; "TimeoutError" for a failed reset.
    """

    ERROR_KEY = "error_key"
    STATUS = "status"
    OBSERVATION = "observation"


class ResetReply(StrEnum):
    """The JSON of a reset: an object, `[observation, null]`, or the bare observation."""

    OBJECT = "object"
    LIST = "list"
    TEXT = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    title: str
    instance_key: str = "id"  # Key of the instance's number in requests.
    item_key: str  # Key of the data index in a reset.
    # Additional fields of a reset's request.
    reset_extra: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    create_body: Mapping[str, Scalar] | None = None  # None: no request body.
    # A create takes seconds and blocks all other answers. Creates are sent one by one: several
    # would hold up the episodes.
    halts_to_create: bool = False
    is_create_bare: bool = False  # The reply is the bare number instead of an object.
    reset_reply: ResetReply = ResetReply.OBJECT
    observation_key: str = "observation"  # Key in a step's reply.
    score_key: str = "reward"  # Key of the value in a step's reply that measures progress.
    done_key: str = "done"
    # Additional fields of a step's reply.
    step_extra: Mapping[str, bool | None] = field(default_factory=dict[str, bool | None])
    max_score: float = 1.0  # Best value under `score_key`; rewards are divided by it.
    # An episode that ends with any score above 0 is solved; otherwise it must end with `max_score`.
    is_solved_by_any_score: bool = False
    lost_reward: float = 0.0  # Reward of an episode that ended without success.
    is_first_by_get: bool = False  # The first observation is requested by GET after a reset.
    extraction: Extraction
    faults: Faults = Faults.ERROR_KEY
    has_close: bool = False  # Servers from before 2025-09 have no close route.
    close_timeout_s: float = 5.0
    # Instances are slow to create or cannot be closed; a client plays many episodes in one.
    is_kept: bool = False
    # A step after the end is an error; otherwise it gets an answer.
    refuses_after_done: bool = False
    # Error of a step before a reset; `{number}` is the instance's.
    error_before_reset: str = "{number}"
    num_items: int | None = None  # Data indices below this are different items; None: unlimited.
    # Defaults without item lists: ranges (first, end, step) of test and training items. Without
    # training ranges, all other items are training items.
    test_items: tuple[tuple[int, ...], ...] = ()
    train_items: tuple[tuple[int, ...], ...] = ()
    max_instances: int | None = None  # More live instances than this share their state.
    reuses_numbers: bool = False  # A create beyond `max_instances` returns an existing number.
    invalid_marks: tuple[str, ...] = ()  # Prefixes of observations that refuse an action.
    details: tuple[str, ...] = ()  # GET routes of its page that the environment answers.
    has_detail: bool = False  # GET /detail: the last reply.
    has_render: bool = False  # POST /render: a picture.
    moves: tuple[str, ...] = ()  # All possible actions, if there are few.
    # Prefix of all other observations. A text without a known prefix is an error, caused either by
    # the action or by the server.
    sound_mark: str = ""
    instruction: Mapping[Style, str]  # Instruction for the agent, before its first observation.


def _read_dialects() -> dict[str, Dialect]:
    """Return the dialects of the table by their names."""
    table = read_table(__file__, "dialects.yaml")
    kinds = {"extraction": Extraction, "faults": Faults, "reset_reply": ResetReply}
    dialects: dict[str, Dialect] = {}
    for name, entry in table["dialects"].items():
        task = entry.pop("task")
        answers = table["answers"][entry["extraction"]]
        instructions = {
            style: f"{task}\n{answers.get(style, answers[Style.COMPACT])}".rstrip()
            for style in Style
        }
        fields = {key: kinds.get(key, _frozen)(value) for key, value in entry.items()}
        dialects[name] = Dialect(name=name, instruction=instructions, **fields)
    return dialects


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


DIALECTS = _read_dialects()
TEXTCRAFT = DIALECTS["textcraft"]
BABYAI = DIALECTS["babyai"]
SCIWORLD = DIALECTS["sciworld"]
ALFWORLD = DIALECTS["alfworld"]
MAZE = DIALECTS["maze"]
WORDLE = DIALECTS["wordle"]
SEARCHQA = DIALECTS["searchqa"]
WEBARENA = DIALECTS["webarena"]
