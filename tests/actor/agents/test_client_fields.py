"""Laws of the fields of clients' requests: each one is honoured, ignored and logged, or refused.

The tables hold every field of the packages `openai` and `anthropic`. A field that a new version of
`openai` adds has no row here, so that a law fails.
"""

import logging
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from actor.agents.messages_api import MESSAGES_API
from actor.agents.responses_api import RESPONSES_API
from actor.api.chat_api import CHAT_API, COMPLETION_API
from actor.api.requests import Api, ApiError, log_ignored

Body = dict[str, Any]
H, I, R = "honoured", "ignored", "refused"  # noqa: E741 - one column of the tables

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Look.", "parameters": PARAMETERS}
FLAT = {"type": "function", **FUNCTION}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"name": "look", "description": "Look.", "input_schema": PARAMETERS}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}

CHAT: Body = {"messages": [USER]}
BARE: Body = {"prompt": "go"}
RESPONSES: Body = {"input": [{"type": "message", **USER}]}
MESSAGES: Body = {"messages": [USER], "max_tokens": 9}

Row = tuple[str, Any]  # How the field is treated, and a value of it.

LABELS: dict[str, Row] = {
    "metadata": (I, {"run": "1"}),
    "model": (H, "policy"),
    "moderation": (I, {"model": "omni"}),
    "prompt_cache_key": (I, "k"),
    "prompt_cache_options": (I, {"mode": "explicit"}),
    "prompt_cache_retention": (I, "24h"),
    "safety_identifier": (I, "u"),
    "service_tier": (I, "flex"),
    "store": (I, True),
    "stream": (H, True),
    "stream_options": (H, {"include_usage": True}),
    "user": (I, "u"),
}
SAMPLING: dict[str, Row] = {
    "frequency_penalty": (I, 0.5),
    "presence_penalty": (I, 0.5),
    "seed": (I, 0),
    "temperature": (I, 0),
    "top_p": (I, 0.1),
}
CHAT_ROWS: dict[str, Row] = LABELS | {
    **SAMPLING,
    "audio": (R, {"voice": "alloy", "format": "wav"}),
    "function_call": (R, {"name": "look"}),
    "functions": (R, [FUNCTION]),
    "logit_bias": (R, {"1": 2}),
    "logprobs": (H, True),
    "max_completion_tokens": (H, 5),
    "max_tokens": (H, 5),
    "messages": (H, [USER, {"role": "assistant", "content": "yes"}, USER]),
    "modalities": (R, ["text", "audio"]),
    "n": (H, 2),
    "parallel_tool_calls": (I, False),
    "prediction": (I, {"type": "content", "content": "x"}),
    "reasoning_effort": (I, "low"),
    "response_format": (R, JSON_SCHEMA),
    "stop": (H, ["x"]),
    "tool_choice": (R, "required"),
    "tools": (H, [TOOL]),
    "top_logprobs": (R, 3),
    "verbosity": (I, "low"),
    "web_search_options": (R, {"search_context_size": "low"}),
    # Fields of other servers, which agents send in `extra_body`.
    "chat_template_kwargs": (R, {"enable_thinking": False}),
    "min_p": (I, 0.1),
    "repetition_penalty": (I, 1.1),
    "top_k": (I, 20),
}
COMPLETION_ROWS: dict[str, Row] = SAMPLING | {
    "best_of": (R, 2),
    "echo": (R, True),
    "logit_bias": (R, {"1": 2}),
    "logprobs": (H, 0),
    "max_tokens": (H, 5),
    "model": (H, "policy"),
    "n": (H, 2),
    "prompt": (H, [1, 2]),
    "stop": (H, "x"),
    "stream": (H, True),
    "stream_options": (H, {"include_usage": True}),
    "suffix": (R, "the end"),
    "user": (I, "u"),
}
RESPONSES_ROWS: dict[str, Row] = LABELS | {
    "access_programs": (R, {"cyber": {}}),
    "background": (R, True),
    "client_metadata": (I, {"session": "1"}),  # Codex sends it.
    "context_management": (I, [{"type": "compaction", "compact_threshold": 9000}]),
    "conversation": (R, "conv_1"),
    "image": (R, {"detail": "low"}),
    "include": (I, ["reasoning.encrypted_content"]),
    "input": (H, "go"),
    "instructions": (H, "Be brief."),
    "max_output_tokens": (H, 5),
    "max_tool_calls": (I, 3),
    "parallel_tool_calls": (I, False),
    "previous_response_id": (H, "resp_1"),
    "prompt": (R, {"id": "pmpt_1"}),
    "reasoning": (I, {"effort": "medium", "summary": "auto"}),
    "temperature": (I, 0),
    "text": (R, {"format": {"type": "json_schema", "name": "x", "schema": {}}}),
    "tool_choice": (R, "required"),
    "tools": (H, [FLAT]),
    "top_logprobs": (R, 3),
    "top_p": (I, 0.1),
    "truncation": (I, "auto"),
}
# All fields of anthropic 2.14.0, of `messages` and of `beta.messages`.
MESSAGES_ROWS: dict[str, Row] = {
    "betas": (I, ["context-management-2025-06-27"]),
    "billing_policy": (I, {"type": "billing_policy", "bill_to": "self"}),
    "cache_control": (I, {"type": "ephemeral"}),
    "compaction": (R, {"type": "auto"}),
    "container": (R, "container_1"),
    "context_management": (I, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": (I, {"previous_message_id": "msg_1"}),
    "fallback_credit_token": (I, "t"),
    "fallbacks": (I, "default"),
    "inference_geo": (I, "us"),
    "max_tokens": (H, 5),
    "mcp_servers": (R, [{"type": "url", "name": "x", "url": "https://x.example"}]),
    "messages": (H, [USER, {"role": "assistant", "content": "yes"}, USER]),
    "metadata": (I, {"user_id": "u"}),
    "model": (H, "policy"),
    "output_config": (I, {"effort": "medium"}),
    "output_format": (R, {"type": "json_schema", "schema": {}}),
    "service_tier": (I, "auto"),
    "speed": (I, "fast"),
    "stop_sequences": (H, ["x"]),
    "stream": (H, True),
    "system": (H, [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]),
    "thinking": (I, {"type": "adaptive"}),
    "thread": (R, {"type": "create"}),
    "tool_choice": (R, {"type": "any"}),
    "tools": (H, [NAMED]),
    "user_profile_id": (I, "u"),
    "workspace_id": (I, "w"),
    # Earlier versions of the API had these.
    "temperature": (I, 0.0),
    "top_k": (I, 5),
    "top_p": (I, 0.5),
}
TABLES: dict[str, tuple[Api, Body, dict[str, Row]]] = {
    "chat": (CHAT_API, CHAT, CHAT_ROWS),
    "completions": (COMPLETION_API, BARE, COMPLETION_ROWS),
    "responses": (RESPONSES_API, RESPONSES, RESPONSES_ROWS),
    "messages": (MESSAGES_API, MESSAGES, MESSAGES_ROWS),
}


def spoken(role: str, *parts: Body) -> Body:
    """Return the change of a request to one with a message of these parts."""
    first = [USER] if role != "user" else []
    last = [USER] if role == "assistant" else []
    return {"messages": [*first, {"role": role, "content": list(parts)}, *last]}


def items(*items: Body) -> Body:
    return {"input": [{"type": "message", **USER}, *items, {"type": "message", **USER}]}


TEXT = {"type": "text", "text": "yes"}
CALLED = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
USED_TOOL = {"type": "tool_use", "id": "c", "name": "look", "input": {}}

# Nested values: (the change of a request, how it is treated, a part of the log or of the error).
CHAT_NESTED: dict[str, tuple[Body, str, str]] = {
    **{
        f"role {role}": ({"messages": [{"role": role, "content": "x"}, USER]}, H, "")
        for role in ("developer", "system", "user", "assistant")
    },
    "role tool": ({"messages": [USER, {"role": "tool", "content": "x"}]}, H, ""),
    "role function": ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, R, "role"),
    "message name": ({"messages": [{**USER, "name": "a"}]}, I, "messages[].name"),
    "message refusal": (
        {"messages": [{"role": "assistant", "content": None, "refusal": "no"}, USER]},
        *(R, "messages[0].refusal"),
    ),
    "message audio": (
        {"messages": [{"role": "assistant", "audio": {"id": "a"}}, USER]},
        *(R, "messages[0].audio"),
    ),
    "part text": (spoken("user", TEXT), H, ""),
    "part text breakpoint": (
        spoken("user", {**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}),
        *(I, "messages[].content[].prompt_cache_breakpoint"),
    ),
    **{
        f"part {kind}": (spoken("user", {"type": kind, kind: {}}), R, kind)
        for kind in ("image_url", "input_audio", "file")
    },
    "part refusal": (spoken("assistant", {"type": "refusal", "refusal": "no"}), R, "refusal"),
    "tool function": ({"tools": [TOOL]}, H, ""),
    "tool custom": ({"tools": [{"type": "custom", "custom": {"name": "patch"}}]}, H, ""),
    "tool strict": (
        {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        *(I, "tools[].strict"),
    ),
    "choice auto": ({"tool_choice": "auto"}, H, ""),
    "choice none": ({"tool_choice": "none"}, H, ""),
    "choice required": ({"tool_choice": "required"}, R, "tool_choice"),
    "choice function": (
        {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        *(R, "tool_choice"),
    ),
    "choice custom": (
        {"tool_choice": {"type": "custom", "custom": {"name": "patch"}}},
        *(R, "tool_choice"),
    ),
    "choice allowed_tools": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        *(R, "tool_choice"),
    ),
    "format text": ({"response_format": {"type": "text"}}, H, ""),
    "format json_object": ({"response_format": {"type": "json_object"}}, R, "response_format"),
    "format json_schema": ({"response_format": JSON_SCHEMA}, R, "response_format"),
    "stream option include_usage": ({"stream_options": {"include_usage": True}}, H, ""),
    "stream option include_obfuscation": ({"stream_options": {"include_obfuscation": True}}, H, ""),
}
REFUSED_ITEMS = (
    *("file_search_call", "computer_call", "computer_call_output", "web_search_call"),
    *("tool_search_call", "tool_search_output", "additional_tools", "configuration_update"),
    *("compaction", "image_generation_call", "code_interpreter_call", "local_shell_call"),
    *("local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call"),
    *("apply_patch_call_output", "mcp_list_tools", "mcp_approval_request"),
    *("mcp_approval_response", "mcp_call", "compaction_trigger", "item_reference", "program"),
    "program_output",
)
RESPONSES_NESTED: dict[str, tuple[Body, str, str]] = {
    **{
        f"role {role}": (items({"type": "message", "role": role, "content": "x"}), H, "")
        for role in ("user", "assistant", "system", "developer")
    },
    "item message": (items({"type": "message", **USER, "id": "m"}), I, "input[].id"),
    "item function_call": (items(CALLED), H, ""),
    "item function_call_output": (
        items(CALLED, {"type": "function_call_output", "call_id": "c", "output": "x"}),
        *(H, ""),
    ),
    "item custom_tool_call": (
        items({"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}),
        *(H, ""),
    ),
    "item custom_tool_call_output": (
        items(CALLED, {"type": "custom_tool_call_output", "call_id": "c", "output": "x"}),
        *(H, ""),
    ),
    "item reasoning": (
        items({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}),
        *(I, "input[].type=reasoning"),
    ),
    **{f"item {kind}": (items({"type": kind}), R, kind) for kind in REFUSED_ITEMS},
    "part input_text": (
        items({"type": "message", "role": "user", "content": [{**TEXT, "type": "input_text"}]}),
        *(H, ""),
    ),
    **{
        f"part {kind}": (
            items({"type": "message", "role": "user", "content": [{"type": kind}]}),
            *(R, kind),
        )
        for kind in ("input_image", "input_file", "refusal")
    },
    "tool function": ({"tools": [FLAT]}, H, ""),
    "tool strict": ({"tools": [{**FLAT, "strict": True}]}, I, "tools[].strict"),
    "tool defer_loading": ({"tools": [{**FLAT, "defer_loading": True}]}, I, "defer_loading"),
    "tool async": ({"tools": [{**FLAT, "async": True}]}, R, "tools[0].async"),
    "tool output_schema": (
        {"tools": [{**FLAT, "output_schema": PARAMETERS}]},
        *(R, "tools[0].output_schema"),
    ),
    "tool allowed_callers": (
        {"tools": [{**FLAT, "allowed_callers": ["programmatic"]}]},
        *(R, "tools[0].allowed_callers"),
    ),
    "tool custom": ({"tools": [{"type": "custom", "name": "patch"}]}, H, ""),
    "tool custom with a grammar": (
        {"tools": [{"type": "custom", "name": "patch", "format": {"type": "grammar"}}]},
        *(I, "tools[].format"),
    ),
    "tool namespace": ({"tools": [{"type": "namespace", "name": "a", "tools": [FLAT]}]}, H, ""),
    **{
        f"tool {kind}": ({"tools": [{"type": kind}]}, I, f"tools[].type={kind}")
        for kind in (
            *("web_search", "web_search_2025_08_26", "web_search_preview"),
            *("web_search_preview_2025_03_11", "image_generation", "tool_search"),
        )
    },
    **{
        f"tool {kind}": ({"tools": [{"type": kind}]}, R, "tools")
        for kind in (
            *("file_search", "computer", "computer_use_preview", "mcp", "code_interpreter"),
            *("programmatic_tool_calling", "local_shell", "shell", "apply_patch"),
        )
    },
    "tool tool_search by the client": (
        {"tools": [{"type": "tool_search", "execution": "client"}]},
        *(R, "tools"),
    ),
    **{f"choice {name}": ({"tool_choice": name}, H, "") for name in ("auto", "none")},
    "choice required": ({"tool_choice": "required"}, R, "tool_choice"),
    **{
        f"choice {kind}": ({"tool_choice": {"type": kind}}, R, "tool_choice")
        for kind in (
            *("allowed_tools", "file_search", "web_search_preview", "computer"),
            *("computer_use_preview", "computer_use", "web_search_preview_2025_03_11"),
            *("image_generation", "code_interpreter", "function", "mcp", "custom"),
            *("programmatic_tool_calling", "apply_patch", "shell"),
        )
    },
    "text verbosity": ({"text": {"verbosity": "low"}}, I, "text.verbosity"),
    "text format text": ({"text": {"format": {"type": "text"}}}, H, ""),
    "text format json_object": ({"text": {"format": {"type": "json_object"}}}, R, "text"),
    "include logprobs": ({"include": ["message.output_text.logprobs"]}, H, ""),
    "stream option include_obfuscation": ({"stream_options": {"include_obfuscation": True}}, H, ""),
}
# All kinds of blocks and tools of anthropic 2.14.0 that have no row of their own.
REFUSED_BLOCKS = (
    *("image", "document", "search_result", "redacted_thinking", "server_tool_use"),
    *("web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result"),
    *("text_editor_code_execution_tool_result", "tool_search_tool_result", "mcp_tool_use"),
    *("mcp_tool_result", "container_upload", "compaction", "tool_addition", "tool_removal"),
    *("mcp_tool_listing", "fallback"),
)
REFUSED_TOOLS = (
    *("bash_20241022", "bash_20250124", "code_execution_20250522", "code_execution_20250825"),
    *("code_execution_20260120", "code_execution_20260521", "browser_toolset_20260801"),
    *("computer_20241022", "memory_20250818", "computer_20250124", "computer_20251124"),
    *("text_editor_20241022", "text_editor_20250124", "text_editor_20250429"),
    *("text_editor_20250728", "computer_toolset_20260801", "advisor_20260301", "mcp_toolset"),
)
OMITTED_TOOLS = (
    *("web_search_20250305", "web_search_20260209", "web_search_20260318", "web_fetch_20250910"),
    *("web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318"),
    *("tool_search_tool_bm25", "tool_search_tool_bm25_20251119", "tool_search_tool_regex"),
    "tool_search_tool_regex_20251119",
)
MESSAGES_NESTED: dict[str, tuple[Body, str, str]] = {
    "role system": ({"messages": [USER, {"role": "system", "content": "x"}]}, H, ""),
    "block text": (spoken("user", TEXT), H, ""),
    "block text cached": (
        spoken("user", {**TEXT, "cache_control": {"type": "ephemeral"}}),
        *(I, "messages[].content[].cache_control"),
    ),
    "block text citations": (spoken("user", {**TEXT, "citations": [{}]}), I, "citations"),
    "block thinking": (
        spoken("assistant", {"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT),
        *(I, "messages[].content[].signature"),
    ),
    "block tool_use": (spoken("assistant", USED_TOOL), H, ""),
    "block tool_use caller": (
        spoken("assistant", {**USED_TOOL, "caller": {"type": "direct"}}),
        *(I, "messages[].content[].caller"),
    ),
    "block tool_result": (
        spoken("user", {"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}),
        *(H, ""),
    ),
    "block tool_result is_error": (
        spoken("user", {"type": "tool_result", "tool_use_id": "c", "is_error": True}),
        *(I, "messages[].content[].is_error"),
    ),
    **{f"block {kind}": (spoken("user", {"type": kind}), R, kind) for kind in REFUSED_BLOCKS},
    "tool custom": ({"tools": [{**NAMED, "type": "custom"}]}, H, ""),
    "tool cached": (
        {"tools": [{**NAMED, "cache_control": {"type": "ephemeral"}}]},
        *(I, "tools[].cache_control"),
    ),
    "tool input_examples": ({"tools": [{**NAMED, "input_examples": [{}]}]}, R, "input_examples"),
    "tool eager_input_streaming": (
        {"tools": [{**NAMED, "eager_input_streaming": True}]},
        *(I, "tools[].eager_input_streaming"),
    ),
    **{f"tool {k}": ({"tools": [{"type": k, "name": "x"}]}, R, "tools") for k in REFUSED_TOOLS},
    **{
        f"tool {k}": ({"tools": [{"type": k, "name": "x"}]}, I, f"tools[].type={k}")
        for k in OMITTED_TOOLS
    },
    "choice auto": ({"tool_choice": {"type": "auto"}}, H, ""),
    "choice none": ({"tool_choice": {"type": "none"}}, H, ""),
    "choice tool": ({"tool_choice": {"type": "tool", "name": "look"}}, R, "tool_choice"),
    "choice one call": (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        *(I, "tool_choice.disable_parallel_tool_use"),
    ),
    "thinking enabled": (
        {"thinking": {"type": "enabled", "budget_tokens": 2000}},
        *(I, "thinking.type=enabled"),
    ),
    "thinking between_tools": ({"thinking": {"type": "between_tools"}}, I, "between_tools"),
    "thinking disabled": ({"thinking": {"type": "disabled"}}, H, ""),
    "thinking of an unknown type": ({"thinking": {"type": "other"}}, R, "thinking"),
    "output task_budget": (
        {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        *(I, "output_config.task_budget"),
    ),
    "output format": (
        {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        *(R, "output_config"),
    ),
}
NESTED: dict[str, dict[str, tuple[Body, str, str]]] = {
    "chat": CHAT_NESTED,
    "responses": RESPONSES_NESTED,
    "messages": MESSAGES_NESTED,
}


@pytest.fixture(autouse=True)
def ignored(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Log again what earlier requests of this process have logged."""
    log_ignored.cache_clear()
    caplog.set_level(logging.INFO, logger="actor.api.requests")
    yield caplog
    log_ignored.cache_clear()


def check(api: Api, body: Body, treatment: str, named: str, log: pytest.LogCaptureFixture) -> None:
    """Check how an API treats a request; the log or the error has the name."""
    log.clear()
    if treatment == R:
        with pytest.raises(ApiError) as caught:
            api.read(body)
        assert caught.value.status == 400
        assert named in f"{caught.value.param} {caught.value.message}"
        return
    api.read(body)
    api.read(body)
    lines = [each.getMessage() for each in log.records]
    if treatment == H:
        assert lines == []
    else:
        assert [line for line in lines if named in line] == lines[:1]  # Once, and no other field.
        assert len(lines) == 1


@pytest.mark.parametrize("name", TABLES)
def test_each_field_is_treated_as_its_row(name: str, ignored: pytest.LogCaptureFixture) -> None:
    api, body, rows = TABLES[name]
    for field, (treatment, value) in rows.items():
        log_ignored.cache_clear()
        if field == "system":  # Its row has a marked cache, which is logged.
            treatment = I
        check(api, {**body, field: value}, treatment, field, ignored)


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in NESTED.items() for case in cases]
)
def test_each_nested_value_is_treated_as_its_row(
    name: str, case: str, ignored: pytest.LogCaptureFixture
) -> None:
    api, body, _ = TABLES[name]
    change, treatment, named = NESTED[name][case]
    check(api, {**body, **change}, treatment, named, ignored)


@pytest.mark.parametrize(("name", "rows"), [(n, t[2]) for n, t in TABLES.items()])
def test_honoured_fields_change_the_request(name: str, rows: dict[str, Row]) -> None:
    """A field that is read without an effect would be ignored silently."""
    api, body, _ = TABLES[name]
    without = {"model", "stream", "stream_options"}  # They change the form of the answer.
    for field, (treatment, value) in rows.items():
        if treatment == H and field not in without:
            changed, plain = api.read({**body, field: value}), api.read(body)
            fields = [each for each in plain.__dataclass_fields__ if each != "body"]
            assert any(getattr(changed, each) != getattr(plain, each) for each in fields), field


def kinds_of(union: Any, key: str = "type") -> set[str]:
    """Return the values of a field in all members of a union of typed dictionaries."""
    if get_origin(union) is Literal:
        return set(get_args(union))
    if hasattr(union, "__annotations__"):
        hint = get_type_hints(union).get(key)
        return {each for each in literals_of(hint)}
    return {kind for member in get_args(union) for kind in kinds_of(member, key)}


def literals_of(hint: Any) -> set[str]:
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return {each for member in get_args(hint) for each in literals_of(member)}


def test_every_parameter_of_the_installed_client_has_a_row() -> None:
    from openai.types import completion_create_params as completions
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    for params, rows in (
        (chat.CompletionCreateParamsNonStreaming, CHAT_ROWS),
        (completions.CompletionCreateParamsNonStreaming, COMPLETION_ROWS),
        (responses.ResponseCreateParamsNonStreaming, RESPONSES_ROWS),
    ):
        assert sorted(set(get_type_hints(params)) - set(rows)) == []


def test_every_kind_of_the_installed_client_has_a_row() -> None:
    from openai.types import chat, responses
    from openai.types.chat.completion_create_params import ResponseFormat
    from openai.types.responses.response_create_params import ToolChoice
    from openai.types.responses.response_input_content_param import ResponseInputContentParam
    from openai.types.responses.response_input_item_param import ResponseInputItemParam

    for union, key, what, cases in (
        (chat.ChatCompletionMessageParam, "role", "role", CHAT_NESTED),
        (chat.ChatCompletionContentPartParam, "type", "part", CHAT_NESTED),
        (chat.ChatCompletionToolUnionParam, "type", "tool", CHAT_NESTED),
        (chat.ChatCompletionToolChoiceOptionParam, "type", "choice", CHAT_NESTED),
        (ResponseFormat, "type", "format", CHAT_NESTED),
        (ResponseInputItemParam, "type", "item", RESPONSES_NESTED),
        (responses.EasyInputMessageParam, "role", "role", RESPONSES_NESTED),
        (ResponseInputContentParam, "type", "part", RESPONSES_NESTED),
        (responses.ToolParam, "type", "tool", RESPONSES_NESTED),
        (ToolChoice, "type", "choice", RESPONSES_NESTED),
    ):
        kinds = kinds_of(union, key)
        assert kinds, union
        assert sorted(kind for kind in kinds if f"{what} {kind}" not in cases) == []


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool"])
def test_chat_refuses_calls_outside_an_assistant_message(role: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": role, "content": "Hi", "tool_calls": [call]}
    with pytest.raises(ApiError, match=r"messages\[0\]\.tool_calls"):
        CHAT_API.read({"model": "m", "messages": [message]})
