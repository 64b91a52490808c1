"""The description that an OpenEnv server gives of itself: its actions and its tasks."""

import json
from dataclasses import dataclass, field
from typing import Any

from common.config.env import RemoteOptions
from common.errors import ConfigError
from common.formats.answers import TOOL_FORM
from common.http.proxies import without_login
from envhub.interop.openenv_socket import ask_server

# Schema titles that mean tool calls.
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDescription:
    """The description that a server gives of itself.

    `splits` maps train and test to the server's split names and sizes; without them an item is a
    seed. `text_field` is the action field for the agent's text; "" if the text is the action's
    JSON.
    """

    description: str
    schema: dict[str, Any]
    text_field: str
    has_tools: bool
    splits: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])


def describe_server(options: RemoteOptions) -> ServerDescription:
    """Return a server's description of itself.

    Raises: ConfigError: no answer, not an OpenEnv server, or a configured name is missing there.
    """
    url = options.url.rstrip("/")
    status, schemas = ask_server(url, "/schema")
    schema = schemas.get("action") if isinstance(schemas, dict) else None
    if status != 200 or not isinstance(schema, dict):
        raise ConfigError(
            f"env.url={without_login(url)}: /schema answered {status}, so this is not an OpenEnv"
            " server; correct env.url or env.dialect"
        )
    known = [name for name in schema.get("properties", {}) if name != "metadata"]
    required = [name for name in schema.get("required", []) if name in known]
    chosen = options.action_field
    if chosen and chosen not in known:
        raise ConfigError(f"env.action_field={chosen!r}: the server's actions have only {known}")
    if not chosen and len(required or known) == 1:
        chosen = (required or known)[0]
    _, metadata = ask_server(url, "/metadata")
    described = metadata.get("description") if isinstance(metadata, dict) else None
    return ServerDescription(
        description=str(described or ""),
        schema=schema,
        text_field=chosen,
        has_tools=not options.action_field and schema.get("title") in TOOL_ACTIONS,
        splits=_splits(url, options),
    )


def _splits(url: str, options: RemoteOptions) -> dict[str, tuple[str, int]]:
    """Return the server's names and sizes of train and test; {} if it lists no tasks."""
    status, names = ask_server(url, "/list_environments")
    if status != 200 or not isinstance(names, list) or not names:
        return {}
    base = f"/{names[0]}"
    status, listed = ask_server(url, f"{base}/splits")
    known = listed if status == 200 and isinstance(listed, list) else []
    found: dict[str, tuple[str, int]] = {}
    for ours, asked in (("train", options.train_items), ("test", options.test_items)):
        kinds = ("train",) if ours == "train" else ("test", "validation")
        fitting = [each["name"] for each in known if asked and each.get("name") == asked]
        if asked and not fitting:
            names = [each.get("name") for each in known]
            raise ConfigError(f"env.{ours}_items={asked!r}: the server's splits are {names}")
        fitting += [each["name"] for each in known if each.get("name") == ours]
        fitting += [each["name"] for each in known if each.get("type") in kinds]
        if not fitting:
            continue
        status, reply = ask_server(url, f"{base}/num_tasks", {"split": fitting[0]})
        if status == 200 and isinstance(reply, dict):
            found[ours] = (fitting[0], int(reply.get("num_tasks", 0)))
    return found


def instruction_of(offer: ServerDescription) -> str:
    """Return the agent's instruction: the environment and the form of its actions."""
    form = 'Answer with one action. What follows "Action:" is sent.'
    if offer.has_tools:
        form = TOOL_FORM
    elif not offer.text_field:
        fields = json.dumps(offer.schema.get("properties", {}), ensure_ascii=False)
        form = f'Answer with one action, as a JSON object after "Action:". Its fields: {fields}'
    return f"{offer.description}\n{form}".strip()
