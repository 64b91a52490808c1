"""A server of MCP tools as an environment: `mcp:calculator.yaml`."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.formats.answers import TEXT_ANSWERS, TOOL_FORM, tools_text
from envhub.env import EnvSpec, Isolation, Style
from envhub.interop.mcp.episode import McpEpisode, Tasks, block_text
from envhub.interop.mcp.link import CLOSE_S, MODES, Link, McpFailure, McpOptions
from envhub.interop.texts import RewardRule
from envhub.interop.yaml_environments import (
    SUBSET,
    optional_package,
    parse_items,
    read_description,
    rule_of,
    run_coroutine,
    split_of,
)

ANSWER = {
    "description": "Ends the episode with your answer.",
    "input_schema": {
        "type": "object",
        "properties": {"answer": {"type": "string"}},
        "required": ["answer"],
    },
}


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of the server that a file describes, named after the file.

    Raises: ConfigError: the file is wrong, the server does not answer, or its tools do not match.
    """
    path, options = read_description(reference, McpOptions)
    if bool(options.url) == bool(options.command):
        raise ConfigError(f"{reference}: exactly one of url and command must be set")
    if options.revision not in MODES:
        known = ", ".join(MODES)
        raise ConfigError(f"{reference}: revision={options.revision!r}: must be one of {known}")
    optional_package("mcp", "mcp")
    limit_s = options.start_timeout_s + options.timeout_s + 2 * CLOSE_S
    try:
        ask = partial(_describe_server, path, options)
        listed, items = run_coroutine(ask, timeout_s=limit_s + options.timeout_s)
    except McpFailure as error:
        raise ConfigError(f"{reference}: {error}") from error
    grades = options.submit in listed
    for number, item in enumerate(items, 1):
        _check_item(f"{reference}: item {number}", item, grades=grades)
    tools = _agents_tools(reference, options, listed, items)
    if not grades:
        tools[options.submit] = ANSWER
    rule = _rule_of(reference, options, has_grader=grades or any("check" in each for each in items))
    places, subset = split_of(items, num_test=options.num_test, max_turns=options.max_turns)
    tasks = Tasks(
        options=options,
        items=items,
        places=places,
        subset=subset,
        rule=rule,
        tools=tools,
        grades=grades,
        shared=[],
    )

    async def stop() -> None:
        for link in tasks.shared:
            await link.close()

    def make(_: Style) -> McpEpisode:
        return McpEpisode(tasks)

    listed_tools = tools_text([{"name": name, **tool} for name, tool in tools.items()])
    form = f"{listed_tools}\n{TOOL_FORM}{TEXT_ANSWERS if options.plain_answers else ''}"
    return EnvSpec(
        name=path.stem,
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, form),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=options.max_sessions,
        step_timeout_s=limit_s,  # A connection and its first call.
        is_repeatable=False,
        start_score=rule.start_score,
        tools=tuple(_as_function(name, tool) for name, tool in tools.items()),
        stop=stop,
        stop_timeout_s=2 * CLOSE_S,
    )


def _rule_of(reference: str, options: McpOptions, *, has_grader: bool) -> RewardRule:
    """Return the reward scale; without a tool that computes rewards, an answer is 0 or 1.

    Raises: ConfigError: the bounds are not in order.
    """
    rule = rule_of(reference, options.min_reward, options.max_reward)
    return rule if has_grader else RewardRule()


async def _describe_server(
    path: Path, options: McpOptions
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the server's tools by name, and the items. Raises: McpFailure, ConfigError."""
    link = await Link.open(options)
    try:
        found = {
            tool.name: {"description": tool.description, "input_schema": tool.input_schema}
            for tool in await link.tools()
        }
        source, _, tool = options.items.partition("tool:")
        if not source and tool:
            result = await link.call(tool, {})
            text = "\n".join(block_text(each) for each in result.content)
        elif "://" in options.items:
            text = await link.read(options.items)
        else:
            text = _read(path.parent / options.items)
        return found, parse_items(text, f"{path}: items={options.items}")
    finally:
        await link.close()


def _agents_tools(
    reference: str,
    options: McpOptions,
    listed: Mapping[str, dict[str, Any]],
    items: list[dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Return the tools that the agent may call, without the session argument.

    Raises: ConfigError: the file names a tool that the server lacks.
    """
    checks = {str(item["check"]["tool"]) for item in items if "check" in item}
    asked = options.items.removeprefix("tool:") if options.items.startswith("tool:") else ""
    named = {*options.hidden, *filter(None, [options.begin, asked]), *checks}
    if missing := named - listed.keys():
        raise ConfigError(f"{reference}: the server has no tool {', '.join(sorted(missing))}")
    tools: dict[str, dict[str, Any]] = {}
    for name, tool in listed.items():
        schema = dict(tool["input_schema"])
        fields = schema.get("properties", {})
        schema["properties"] = {k: v for k, v in fields.items() if k != options.session}
        schema["required"] = [k for k in schema.get("required", []) if k != options.session]
        if name not in named:
            tools[name] = {**tool, "input_schema": schema}
    return tools


def _as_function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the format of chat templates."""
    text = str(tool["description"] or "")
    return {"name": name, "description": text, "parameters": tool["input_schema"]}


def _read(path: Path) -> str:
    """Return a file's text. Raises: ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"items: {path}: {error}") from error


def _check_item(where: str, item: Mapping[str, Any], *, grades: bool) -> None:
    """Raise ConfigError if the item has no prompt, or no answer and no check."""
    if "prompt" not in item or (not grades and not {"answer", "check"} & item.keys()):
        raise ConfigError(f"{where} lacks {'prompt' if grades else 'prompt, and answer or check'}")
    check = item.get("check", {"tool": ""})
    if not isinstance(check, dict) or not isinstance(check.get("tool"), str):
        raise ConfigError(f'{where}: check must be {{"tool": ..., "arguments": {{...}}}}')
