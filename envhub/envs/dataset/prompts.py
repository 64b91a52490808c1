"""Makes the messages of a record: columns, templates, the system prompt and the tools."""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from common.config.envs import DatasetOptions
from common.errors import ConfigError
from common.formats.calls import as_call, read_arguments
from common.user_code import find_path
from envhub.envs.dataset.files import Record
from envhub.envs.dataset.graders import final_answer

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "input")
ANSWERS = (
    "answer",
    "ground_truth",
    "solution",
    "reward_model.ground_truth",
    "response",
    "output",
    "completion",
    "target",
)
REFERENCES = frozenset({"answer", "ground_truth"})  # Keywords with the reference answer.
ROLES = ("system", "user", "assistant", "tool")
TEXT_FILES = (".txt", ".md", ".jinja", ".j2")
JSON_MESSAGES = re.compile(r"\s*\[\s*\{\s*\"")  # The start of a list of objects.
SUBMIT = "submit"  # The tool that ends an episode with an answer.

# A message: role, content, and for tools "tool_calls", "tool_call_id" and "name".
Message = dict[str, Any]
SHOWN = ("tool_calls", "tool_call_id", "name", "reasoning_content")
NOT_SHOWN = ("function_call", "audio", "images", "image", "image_url", "video")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The prompt of a record: messages, of which the last is the user's."""

    messages: list[Message]
    is_conversational: bool  # The record's own prompt is a list of messages.
    answer: str | None  # The reference answer as the record has it.
    # Keywords that have the reference answer of data.answer, and not the column of their name.
    replaced: frozenset[str] = frozenset()

    @property
    def ground_truth(self) -> str | None:
        """The final part of the reference answer, after `####` if it has that mark."""
        return None if self.answer is None else final_answer(self.answer)


def value_at(record: Record, column: str) -> Any:
    """Return the value of a column; a dot enters an object or a list. None: there is none."""
    if column in record:
        return record[column]
    value: Any = record
    for part in column.split("."):
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


class PromptMaker:
    """Makes questions from records, by the columns and templates of the configuration."""

    def __init__(self, options: DatasetOptions, first: Record) -> None:
        """Choose the columns by the first record.

        Raises: ConfigError: a column or a file is missing, or a template is wrong.
        """
        self._column = _choose("data.prompt", options.prompt, PROMPTS, first)
        if not options.prompt and self._column == "instruction" and first.get("input"):
            logger.warning(
                "dataset: the column 'input' is not in the prompt; set"
                " 'data.template={{ instruction }} {{ input }}' or data.prompt=instruction"
            )
        self._answer = options.answer or _first_of(ANSWERS, first)
        if options.answer and value_at(first, options.answer) is None:
            raise ConfigError(_no_column("data.answer", options.answer, first))
        chosen = {options.answer} if options.answer else REFERENCES
        self.replaced = REFERENCES - chosen
        self._is_plain = options.template == DatasetOptions().template
        self._template = compile_template("data.template", read_text(options.template))
        system = read_text(options.system)
        self._system = system
        is_template = options.system.endswith((".jinja", ".j2"))
        self._system_template = compile_template("data.system", system) if is_template else None

    def check(self, record: Record, place: str) -> None:
        """Raise ConfigError if the record has no prompt."""
        value = self._prompt_of(record)
        is_blank = isinstance(value, str) and not value.strip()
        if value is None or is_blank or value == []:
            raise ConfigError(f"{place}: the record has no prompt in its column {self._column!r}")
        if not isinstance(value, (str, list)):
            kind = type(value).__name__
            raise ConfigError(f"{place}: the prompt is {kind}, not a text or a list of messages")
        if isinstance(value, list):
            _messages(value, place)

    def _prompt_of(self, record: Record) -> Any:
        """Return the prompt of a record; messages may be JSON text, as tables store them."""
        value = value_at(record, self._column)
        if not isinstance(value, str) or not JSON_MESSAGES.match(value):
            return value
        try:
            messages = json.loads(value)
        except ValueError:
            return value
        is_messages = all(isinstance(message, dict) and "role" in message for message in messages)
        return messages if is_messages else value

    def raw_prompt(self, record: Record, place: str) -> str:
        """Return the prompt as text, to compare records, without an answer of the assistant.

        Raises: ConfigError: a template fails.
        """
        if self._is_plain and self._system_template is None:
            prompt = self._prompt_of(record)
            is_answered = isinstance(prompt, list) and prompt[-1].get("role") == "assistant"
            return json.dumps(prompt[:-1] if is_answered else prompt, default=str)
        return json.dumps(self.make(record, place).messages, default=str)

    def answer(self, record: Record, place: str) -> str | None:
        """Return the reference answer of a record. Raises: ConfigError: its prompt is wrong."""
        answer = value_at(record, self._answer) if self._answer else None
        return self.make(record, place).answer if answer is None else answer_text(answer)

    def make(self, record: Record, place: str) -> Question:
        """Return the question of a record. Raises: ConfigError: the record or a template fails."""
        self.check(record, place)
        value = self._prompt_of(record)
        answer = value_at(record, self._answer) if self._answer else None
        messages = _messages(value, place) if isinstance(value, list) else [_user(value)]
        if messages[-1]["role"] == "assistant":
            last = messages.pop()
            reference = last["content"] or [call["function"] for call in last.get("tool_calls", [])]
            answer = reference if answer is None else answer
        if not messages or messages[-1]["role"] != "user":
            raise ConfigError(f"{place}: the last message of the prompt must be the user's")
        if not self._is_plain:
            shown = {**record, "record": record, "prompt": messages[-1]["content"]}
            messages[-1] = _user(render("data.template", self._template, shown, place))
        if self._system:
            messages = [each for each in messages if each["role"] != "system"]
            messages.insert(0, {"role": "system", "content": self._system_of(record, place)})
        return Question(
            messages=messages,
            is_conversational=isinstance(value, list),
            answer=answer_text(answer),
            replaced=self.replaced,
        )

    def _system_of(self, record: Record, place: str) -> str:
        """Return the system prompt of a record."""
        if self._system_template is None:
            return self._system
        return render("data.system", self._system_template, {**record, "record": record}, place)


def answer_text(answer: Any) -> str | None:
    """Return a reference answer as text; a list of messages has the text of its last one.

    None: there is none. NaN stands for a missing value of a table.
    """
    is_messages = isinstance(answer, list) and answer and isinstance(answer[-1], dict)
    if is_messages and "content" in answer[-1]:
        answer = answer[-1]["content"]
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, float) and math.isnan(answer):
        return None
    is_json = isinstance(answer, (int, float, list, dict))
    return json.dumps(answer, ensure_ascii=False, default=str) if is_json else str(answer)


def _user(text: str) -> Message:
    """Return a text as a user's message."""
    return {"role": "user", "content": text}


def _messages(value: Sequence[Any], place: str) -> list[Message]:
    """Return the messages of a prompt. Raises: ConfigError: one is malformed."""
    messages: list[Message] = []
    for number, entry in enumerate(value, 1):
        where = f"{place}: message {number} of the prompt"
        if not isinstance(entry, dict) or entry.get("role") not in ROLES:
            raise ConfigError(f"{where} needs a role of {', '.join(ROLES)}")
        for name in NOT_SHOWN:
            if entry.get(name):
                raise ConfigError(f"{where} has {name!r}, which cannot be shown")
        calls = _calls(entry.get("tool_calls"), where)
        content = entry.get("content")
        if content is None and calls:
            content = ""  # Many templates would write a null as "None".
        if isinstance(content, list) and all(_is_text_part(part) for part in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise ConfigError(f"{where} has the content {content!r:.80}, which is not text")
        message: Message = {"role": entry["role"], "content": content}
        fields = {**entry, "tool_calls": calls}
        if type(fields.get("tool_call_id")) is int:
            fields["tool_call_id"] = str(fields["tool_call_id"])
        for name in SHOWN:
            if not fields.get(name):
                continue
            if name != "tool_calls" and not isinstance(fields[name], str):
                raise ConfigError(f"{where} has {name}={fields[name]!r:.80}, which is not text")
            message[name] = fields[name]
        messages.append(message)
    return messages


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message as chat templates read them. Raises: ConfigError."""
    if isinstance(calls, str):
        try:
            calls = json.loads(calls or "[]")
        except ValueError as error:
            raise ConfigError(f"{where} has tool_calls={calls!r:.80}: not JSON: {error}") from error
    if not calls:
        return []
    if not isinstance(calls, list):
        raise ConfigError(f"{where} has tool_calls={calls!r:.80}, which is not a list")
    read: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{where} has the call {call!r:.80}, which has no name of a function")
        try:
            arguments = read_arguments(function.get("arguments") or {})
        except ValueError as error:
            raise ConfigError(
                f"{where} has a call of {function['name']!r} whose arguments are no JSON object:"
                f" {error}"
            ) from error
        number = {"id": str(call["id"])} if call.get("id") else {}
        read.append({**number, **as_call(function["name"], arguments)})
    return read


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a message is a text, without a picture or a sound."""
    return (
        isinstance(part, dict)
        and isinstance(part.get("text"), str)
        and not any(part.get(name) for name in NOT_SHOWN)
    )


def _first_of(names: Sequence[str], record: Record) -> str:
    """Return the first of these columns that a record has; "" for none."""
    return next((name for name in names if value_at(record, name) is not None), "")


def _choose(key: str, value: str, names: Sequence[str], first: Record) -> str:
    """Return the name of a column that the first record has. Raises: ConfigError."""
    column = value or _first_of(names, first)
    if not column or (value and value not in first and value_at(first, value) is None):
        raise ConfigError(_no_column(key, value, first))
    return column


def _no_column(key: str, value: str, first: Record) -> str:
    """Return the text about a missing column."""
    shown = f"{key}={value}: no such column" if value else f"{key} is not set"
    return f"{shown}; the columns are {', '.join(map(str, first))}"


def read_text(value: str, key: str = "data.template or data.system") -> str:
    """Return a text of the configuration, or the content of the file that it names.

    Raises: ConfigError: there is no such file; the message has the key.
    """
    if "\n" in value or not value.endswith(TEXT_FILES):
        return value
    return find_path(key, value).read_text(encoding="utf-8")


def compile_template(key: str, text: str) -> Template:
    """Return a Jinja template. Raises: ConfigError: its syntax is wrong."""
    try:
        return SandboxedEnvironment(undefined=StrictUndefined).from_string(text)
    except TemplateError as error:
        raise ConfigError(f"{key}: the template is wrong: {error}") from error


def render(key: str, template: Template, shown: Mapping[str, Any], place: str) -> str:
    """Return the text of a template. Raises: ConfigError: it fails on the record."""
    try:
        return template.render(shown)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        columns = ", ".join(map(str, shown))
        raise ConfigError(f"{key}: the template fails on {place}: {error} ({columns})") from error


def read_tools(
    options: DatasetOptions, files: Sequence[tuple[str, Sequence[Record]]]
) -> tuple[list[dict[str, Any]], str]:
    """Return the tools as {"name", "description", "parameters"}, and a column of the records.

    With a column, each record has its own tools. Without it, all have the returned ones.

    Args:
        files: name and records of each file, the training records first.

    Raises: ConfigError: the tools of a record are malformed.
    """
    setting = options.tools
    where = f"data.tools={setting}"
    _, records = files[0]
    if not setting:
        if _looks_like_tools(records[0].get("tools")):
            logger.warning("dataset: tools of the records are not used; set data.tools=tools")
        return [], ""
    if setting.endswith(".json"):
        path = find_path("data.tools", setting)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        return tools_of(content, where), ""
    first = next((tools for each in records if (tools := value_at(each, setting))), None)
    if first is None:
        if value_at(records[0], setting) is None:
            raise ConfigError(_no_column("data.tools", setting, records[0]))
        raise ConfigError(f"{where}: expects a list of tools; no record has one")
    if all(value_at(record, setting) == first for _, each in files for record in each):
        return tools_of(first, where), ""
    for name, each in files:
        for number, record in enumerate(each, 1):
            tools_of(value_at(record, setting) or [], f"{where}: record {number} of {name}")
    return [], setting


def _looks_like_tools(value: Any) -> bool:
    """Return whether a value is a list of tools, or the JSON text of one."""
    try:
        return bool(value) and bool(tools_of(value, ""))
    except ConfigError:
        return False


def tools_of(tools_value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of tools, which may be JSON text. Raises: ConfigError."""
    if isinstance(tools_value, str):
        try:
            tools_value = json.loads(tools_value)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        tools_value = [] if tools_value is None else tools_value
    if not isinstance(tools_value, list):
        raise ConfigError(f"{where}: expects a list of tools")
    tools = [_tool(where, tool) for tool in tools_value]
    names = [tool["name"] for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{where}: has the tool {min(twice)!r} twice")
    return tools


def _tool(where: str, tool: Any) -> dict[str, Any]:
    """Return a tool with its name, description and parameters. Raises: ConfigError."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise ConfigError(f"{where}: a tool needs a name; one is {tool!r:.80}")
    names = ("parameters", "input_schema", "inputSchema")
    schema = next((function[name] for name in names if function.get(name)), {})
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ConfigError(
                f"{where}: parameters of {function['name']}: not JSON: {error}"
            ) from error
    if not isinstance(schema, dict):
        raise ConfigError(f"{where}: parameters of {function['name']} are no JSON schema")
    if "properties" not in schema and all(isinstance(each, dict) for each in schema.values()):
        schema = {"type": "object", "properties": schema}  # Some sets list the arguments alone.
    return {
        "name": function["name"],
        "description": str(function.get("description") or ""),
        "parameters": schema,
    }
