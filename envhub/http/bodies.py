"""Request and response bodies: schemas, parsing and serialization."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from common.text import valid_text
from envhub.env import Style

MAX_SEED = 2**63 - 1
MAX_NAME_CHARS = 200
MAX_BATCH = 1024
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # A surrogate code unit as a JSON escape.

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


class BadBody(ValueError):
    """The body does not match the route's schema; the text names the position and the reason."""


class CreateRequest(BaseModel):
    """Body of POST /v1/sessions."""

    model_config = ConfigDict(extra="forbid", cache_strings="keys")

    env: str = Field(max_length=MAX_NAME_CHARS)
    item_id: str = Field(max_length=MAX_NAME_CHARS)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    style: Style = Style.COMPACT
    owner: str = Field(default="", max_length=MAX_NAME_CHARS)


class StepRequest(BaseModel):
    """Body of POST /v1/sessions/{id}/step; `seq` starts at 1 and grows by one.

    `num_bytes` is not 0 if the action was too large to send; the hub then answers it as invalid.
    `save` requests the state after the step, if the environment can save it.
    """

    model_config = ConfigDict(extra="forbid", cache_strings="keys")

    action: str
    seq: int = Field(ge=1, le=MAX_SEED)
    num_bytes: int = Field(default=0, ge=0, le=MAX_SEED)
    save: bool = False


class LoadRequest(BaseModel):
    """Body of POST /v1/sessions/{id}/load: the `saved` text of a step of the same item and seed."""

    model_config = ConfigDict(extra="forbid", cache_strings="keys")

    saved: str


class CloseRequest(BaseModel):
    """One entry of POST /v1/close/batch."""

    model_config = ConfigDict(extra="forbid", cache_strings="keys")

    session_id: str = Field(max_length=MAX_NAME_CHARS)


class BatchStepRequest(StepRequest, CloseRequest):
    """One entry of POST /v1/step/batch."""


class Created(BaseModel):
    """A new session; `state` as in `Stepped`; `start_score` is the reward before the first step.

    `messages` precede the observation, which is the user's next message. `tools` are the item's, if
    its environment has other tools for each item. An environment with
    several players has `num_seats`, and `seat` is the one that moves first. `can_save`: steps can
    return the state (`save`), which another session loads. `is_repeatable`: equal actions always
    have equal results.
    """

    session_id: str
    observation: str
    state: str = ""
    start_score: float = Field(default=0.0, ge=0, le=1)
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    seat: int | None = None
    num_seats: int | None = None
    can_save: bool = False
    is_repeatable: bool = False


class Stepped(BaseModel):
    """The result of one action.

    `is_valid` is False when the text was not an executable action. `is_success` is True when the
    episode ended solved, at any reward. `state` is a fingerprint of the state after the action, ""
    if the environment has no states. `is_truncated` is True when a limit of the environment ended
    the episode (`done`) before the task was finished. `metrics` are named numbers of the episode,
    and `facts` are values for the rewards over its group.
    With several players, `seat` moves next, and `seat_rewards` has the reward of each seat.
    `saved` is the state after the step, if it was requested and the episode continues; `unsaved` is
    the reason why it could not be saved.
    """

    observation: str
    reward: float = Field(ge=0, le=1)
    done: bool
    is_valid: bool
    is_success: bool
    state: str = ""
    is_truncated: bool = False
    metrics: dict[str, float] = {}
    facts: dict[str, Any] = {}
    seat: int | None = None
    seat_rewards: list[float] | None = None
    saved: str | None = None
    unsaved: str | None = None


class Hint(BaseModel):
    """Actions that are executable now, and the expert's action; null if there is none."""

    valid_actions: list[str]
    expert_action: str | None


class Rendered(BaseModel):
    """The state as text for people, and a hash of the state at reset."""

    text: str
    fingerprint: str


class Pictured(BaseModel):
    """The state for people: a picture as defined in `Env`, or the text of `Rendered`."""

    picture: Any


class Failed(BaseModel):
    """The reason why a request failed."""

    detail: str


class Entry(BaseModel):
    """One entry of a batch's answer: `status` and the fields of the corresponding single route."""

    status: int
    detail: str | None = None


class CreatedEntry(Entry):
    """One entry of the answer to POST /v1/sessions/batch."""

    session_id: str | None = None
    observation: str | None = None
    state: str | None = None
    start_score: float | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    seat: int | None = None
    num_seats: int | None = None
    can_save: bool | None = None
    is_repeatable: bool | None = None


class SteppedEntry(Entry):
    """One entry of the answer to POST /v1/step/batch."""

    observation: str | None = None
    reward: float | None = None
    done: bool | None = None
    is_valid: bool | None = None
    is_success: bool | None = None
    state: str | None = None
    is_truncated: bool | None = None
    metrics: dict[str, float] | None = None
    facts: dict[str, Any] | None = None
    seat: int | None = None
    seat_rewards: list[float] | None = None
    saved: str | None = None
    unsaved: str | None = None


_BATCH = TypeAdapter(Annotated[list[Any], Field(max_length=MAX_BATCH)])


def parse_body(model: type[Model], raw: bytes) -> Model:
    """Return the body of a request. Raises: BadBody: no JSON, or not of that schema."""
    return _checked(partial(validated, model), raw)


def validated(model: type[Model], raw: bytes) -> Model:
    """Return the body of a request; lone surrogates in its texts are repaired.

    Raises: pydantic.ValidationError: no JSON, or not of that schema.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        try:
            parsed = repaired(raw)
        except ValueError:
            raise error from None
        return model.model_validate(parsed)


def repaired(raw: str | bytes) -> Any:
    r"""Return parsed JSON with every lone surrogate, such as "\ud800", replaced by U+FFFD.

    A policy can sample such a text, and the strict parser refuses it.

    Raises: ValueError: no JSON, nested too deep, or no lone surrogate.
    """
    if not SURROGATE.search(raw if isinstance(raw, bytes) else raw.encode(errors="replace")):
        raise ValueError("no lone surrogate")
    try:
        return _valid(json.loads(raw))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def parse_entry(model: type[Model], entry: object) -> Model:
    """Return one entry of a batch. Raises: BadBody."""
    return _checked(model.model_validate, entry)


def parse_batch(raw: bytes) -> list[Any]:
    """Return the entries of a batch without validating them.

    Raises: BadBody: no JSON list, or longer than MAX_BATCH.
    """
    return _checked(_batch_of, raw)


def _batch_of(raw: bytes) -> list[Any]:
    """Return the entries of a batch; lone surrogates are repaired."""
    try:
        return _BATCH.validate_json(raw)
    except ValidationError as error:
        try:
            parsed = repaired(raw)
        except ValueError:
            raise error from None
        return _BATCH.validate_python(parsed)


def _checked(validate: Callable[[Any], T], value: object) -> T:
    """Return a validated value. Raises: BadBody."""
    try:
        return validate(value)
    except ValidationError as error:
        raise BadBody(_explain(error)) from error


def json_response(content: object, *, status: int = 200) -> Response:
    """Return a JSON response; FastAPI's own serialization would validate every answer again."""
    return Response(json_bytes(content), status_code=status, media_type="application/json")


def json_bytes(content: object) -> bytes:
    """Return JSON that every parser accepts: NaN and infinity are null.

    They can occur only in pictures: `StepResult` and `Sessions` refuse them elsewhere.
    """
    try:
        return to_json(content, inf_nan_mode="null")
    except PydanticSerializationError:  # A lone surrogate, which some parsers refuse.
        return to_json(_valid(content), inf_nan_mode="null")


def _valid(content: Any) -> Any:
    """Return JSON whose texts are all valid Unicode."""
    if isinstance(content, dict):
        return {_valid(key): _valid(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_valid(each) for each in content]
    return valid_text(content) if isinstance(content, str) else content


def _explain(error: ValidationError) -> str:
    """Return the validation errors as text, without the input."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        ": ".join(
            filter(None, [".".join(str(part)[:40] for part in problem["loc"]), problem["msg"]])
        )
        for problem in problems[:5]
    )


def body_of(model: type[BaseModel], *, is_list: bool = False) -> dict[str, Any]:
    """Return the OpenAPI entry of a route that parses its body itself."""
    schema: dict[str, Any] = model.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    if is_list:
        schema = {"type": "array", "items": schema, "maxItems": MAX_BATCH}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a JSON schema without references."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return {**definitions[schema["$ref"].rpartition("/")[2]], **rest}
    return {key: _inlined(value, definitions) for key, value in schema.items()}
