"""How the fifteen AgentGym servers differ on the wire, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Scalar = str | int


class Extraction(StrEnum):
    """What of the model's text is sent as the action; AgentGym's clients do this, not its servers.

    ONE_ACTION: the line after the only `Action:`, letters, digits, commas and spaces of it.
    LAST_ACTION: all that follows the last `Action:`.
    FIRST_ACTION: what follows the first `Action:`, up to a second one.
    SQL_BLOCK: the last fenced block of SQL.
    FENCED: the whole text, if it has a fenced block.
    WHOLE: the whole text.
    """

    ONE_ACTION = "one_action"
    LAST_ACTION = "last_action"
    FIRST_ACTION = "first_action"
    SQL_BLOCK = "sql_block"
    FENCED = "fenced"
    WHOLE = "whole"


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
    """One server's wire.

    Attributes:
        instance_key: name of the instance number in requests.
        item_key: name of the data index in a reset.
        reset_extra: what a reset carries besides.
        create_body: JSON of a create; None sends no body at all.
        halts_to_create: a create takes seconds, and nothing else is answered meanwhile; so creates
            are asked for one by one, lest they hold up the episodes.
        is_create_bare: create answers with the bare number instead of an object that holds it.
        observation_key: name of a step's text.
        score_key: name of a step's value that says how the episode stands.
        done_key: name of a step's end flag.
        step_extra: what the reply to a step carries besides.
        max_score: the best value under `score_key`; rewards are divided by it.
        lost_reward: what an episode that ended without success pays.
        is_first_by_get: the first observation is asked for by GET after a reset.
        has_close: the server knows how to close an instance; those of before 2025-09 do not.
        close_timeout_s: how long that may take.
        is_kept: instances are dear to make or cannot be closed, so a client plays many episodes
            in one.
        refuses_after_done: a step after the end is an error; else it is answered.
        error_before_reset: text of the error of a step before the first reset; `{number}` is the
            instance's.
        num_items: data indices 0..num_items-1 are different items; None: there is no end.
        max_instances: more live instances than this share their state.
        reuses_numbers: a create beyond `max_instances` gives out an instance that there is.
        invalid_marks: how observations begin that refuse an action.
        moves: all the actions there are, when they are few.
        sound_mark: how observations begin otherwise; another text is that of an error, be it of
            the action or of the server.
    """

    name: str
    title: str
    instance_key: str = "id"
    item_key: str
    reset_extra: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    create_body: Mapping[str, Scalar] | None = None
    halts_to_create: bool = False
    is_create_bare: bool = False
    reset_reply: ResetReply = ResetReply.OBJECT
    observation_key: str = "observation"
    score_key: str = "reward"
    done_key: str = "done"
    step_extra: Mapping[str, bool | None] = field(default_factory=dict[str, bool | None])
    max_score: float = 1.0
    lost_reward: float = 0.0
    is_first_by_get: bool = False
    extraction: Extraction
    faults: Faults = Faults.ERROR_KEY
    has_close: bool = False
    close_timeout_s: float = 5.0
    is_kept: bool = False
    refuses_after_done: bool = False
    error_before_reset: str = "{number}"
    num_items: int | None = None
    max_instances: int | None = None
    reuses_numbers: bool = False
    invalid_marks: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    sound_mark: str = ""


TEXTCRAFT = Dialect(
    name="textcraft",
    title="TextCraft",
    item_key="data_idx",
    create_body={},
    extraction=Extraction.ONE_ACTION,
    has_close=True,
    num_items=544,
    invalid_marks=("Could not ", "Wrong item format"),
)
BABYAI = Dialect(
    name="babyai",
    title="BabyAI",
    item_key="data_idx",
    score_key="score",
    extraction=Extraction.ONE_ACTION,
    has_close=True,
    refuses_after_done=True,
    invalid_marks=(
        "The action is not recognized",
        "You cannot pickup ",
        "You cannot drop ",
        "You cannot go ",
        "You cannot toggle ",
        "There is a barrier",
        "No change in state",
    ),
)
SCIWORLD = Dialect(
    name="sciworld",
    title="ScienceWorld",
    item_key="data_idx",
    score_key="score",
    max_score=100.0,
    extraction=Extraction.LAST_ACTION,
    has_close=True,
    is_kept=True,
    refuses_after_done=True,
    error_before_reset="'ScienceWorldEnv' object has no attribute 'variationIdx'",
    num_items=4639,
    invalid_marks=("No known action matches", "Unknown action"),
)
ALFWORLD = Dialect(
    name="alfworld",
    title="AlfWorld",
    item_key="game",
    reset_extra={"world_type": "Text"},
    extraction=Extraction.LAST_ACTION,
    is_kept=True,
    refuses_after_done=True,
    num_items=2620,
    invalid_marks=("Nothing happens",),
)
MAZE = Dialect(
    name="maze",
    title="LMRL-Gym",
    item_key="game",
    lost_reward=-1.0,
    extraction=Extraction.FIRST_ACTION,
    is_kept=True,
    refuses_after_done=True,
    num_items=25,
    moves=("move up", "move down", "move left", "move right"),
)
WORDLE = Dialect(
    name="wordle",
    title="LMRL-Gym",
    item_key="seed",
    extraction=Extraction.FIRST_ACTION,
    is_kept=True,
    refuses_after_done=True,
    invalid_marks=("invalid word",),
)
WEBSHOP = Dialect(
    name="webshop",
    title="WebShop",
    instance_key="env_idx",
    item_key="session_id",
    halts_to_create=True,
    is_create_bare=True,
    reset_reply=ResetReply.LIST,
    observation_key="state",
    is_first_by_get=True,
    extraction=Extraction.LAST_ACTION,
    faults=Faults.STATUS,
    is_kept=True,
    max_instances=8000,
    reuses_numbers=True,
)
SQLGYM = Dialect(
    name="sqlgym",
    title="SQLGym",
    instance_key="env_idx",
    item_key="item_id",
    is_create_bare=True,
    reset_reply=ResetReply.LIST,
    observation_key="state",
    step_extra={"info": None},
    is_first_by_get=True,
    extraction=Extraction.SQL_BLOCK,
    faults=Faults.STATUS,
    is_kept=True,
    num_items=10962,
    max_instances=8,
    reuses_numbers=True,
)
SEARCHQA = Dialect(
    name="searchqa",
    title="SearchQA",
    instance_key="env_idx",
    item_key="id",
    create_body={"id": 0},
    is_create_bare=True,
    reset_reply=ResetReply.TEXT,
    step_extra={"info": None},
    is_first_by_get=True,
    extraction=Extraction.WHOLE,
    faults=Faults.STATUS,
    has_close=True,
    num_items=221328,
    invalid_marks=("Your previous action is invalid",),
)
WEBARENA = Dialect(
    name="webarena",
    title="WebArena",
    instance_key="env_idx",
    item_key="idx",
    reset_extra={"seed": 0},
    done_key="terminated",
    step_extra={"truncated": False, "info": None},
    is_first_by_get=True,
    extraction=Extraction.FENCED,
    faults=Faults.OBSERVATION,
    has_close=True,
    close_timeout_s=35.0,  # never below 5 s; the server itself gives up after 30
    is_kept=True,
    num_items=812,
    invalid_marks=("Cannot parse action", "Invalid "),
    sound_mark="OBSERVATION:",
)


def _tool(name: str, num_items: int, max_instances: int | None = None) -> Dialect:
    return Dialect(
        name=name,
        title=name.capitalize(),
        instance_key="env_idx",
        item_key="id",
        create_body={"id": 0},
        is_create_bare=True,
        reset_reply=ResetReply.TEXT,
        is_first_by_get=True,
        extraction=Extraction.WHOLE,
        faults=Faults.STATUS,
        is_kept=True,
        num_items=num_items,
        max_instances=max_instances,
        invalid_marks=("Format error", "ERROR |", "Observation: ERROR |"),
    )


# One Todoist or Google account backs all instances of todo and sheet: a second wipes the first.
DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        TEXTCRAFT,
        BABYAI,
        SCIWORLD,
        ALFWORLD,
        MAZE,
        WORDLE,
        WEBSHOP,
        SQLGYM,
        SEARCHQA,
        _tool("weather", 343),
        _tool("movie", 238),
        _tool("academia", 20),
        _tool("todo", 155, max_instances=1),
        _tool("sheet", 20, max_instances=1),
        WEBARENA,
    )
}
# The environments of ours that AgentGym's clients can play.
SERVED = (TEXTCRAFT, BABYAI, SCIWORLD, SEARCHQA, WEBARENA, MAZE, WORDLE, SQLGYM)
