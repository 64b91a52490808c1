"""Laws of reading calls of tools, in whatever form a template writes them."""

from typing import Any

import pytest

from common.formats.calls import ARGUMENTS, KEYS, NAME, VALUES, CallForm

FULL = f'"{KEYS[0]}": "{VALUES[0]}", "{KEYS[1]}": "{VALUES[1]}"'
TAGGED = f"<parameter={KEYS[0]}>\n{VALUES[0]}\n</parameter>\n<parameter={KEYS[1]}>\n{VALUES[1]}\n"
ENDS = "</function>\n</tool_call>"


def json_form(text: str) -> CallForm:
    """Return the form of a template that writes ARGUMENTS as JSON in place of ..."""
    return CallForm.of(*(text.replace("...", given).replace("NAME", NAME) for given in (FULL, "")))


FORMS = {
    "qwen": json_form('<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'),
    "llama": json_form('{"name": "NAME", "parameters": {...}}'),
    "mistral": json_form('[TOOL_CALLS] [{"name": "NAME", "arguments": {...}, "id": "call00000"}]'),
    "named": json_form("[TOOL_CALLS]NAME[ARGS]{...}"),
    "nested": json_form(
        '<call>{"type": "function", "function": {"name": "NAME", "args": {...}}}</call>'
    ),
    "coder": CallForm.of(
        f"<think>\n\n</think>\n<tool_call>\n<function={NAME}>\n{TAGGED}</parameter>\n{ENDS}",
        f"<think>\n\n</think>\n<tool_call>\n<function={NAME}>\n{ENDS}",
    ),
}
LOOK = [("look", {"where": "up"})]
GO = [*LOOK, ("go", {})]
CODER = "<tool_call>\n<function=look>\n<parameter=where>\nup\n</parameter>\n" + ENDS


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        ("qwen", '<tool_call>{"name":"look","arguments":{"where":"up"}}</tool_call>', "", LOOK),
        ("qwen", 'Hm.<tool_call> {"arguments":{"where":"up"},"name":"look"}', "Hm.", LOOK),
        ("qwen", '<tool_call>{"name":"look","arguments":"{\\"where\\":\\"up\\"}"}', "", LOOK),
        (
            "qwen",
            'a<tool_call>{"name":"look","arguments":{"where":"up"}}</tool_call> b\n'
            '<tool_call>{"name":"go","arguments":{}}</tool_call>c',
            "a\nb\nc",
            GO,
        ),
        (
            "qwen",
            '<tool_call>{"name":"x","arguments":{"a":"<tool_call></tool_call>"}}</tool_call>',
            "",
            [("x", {"a": "<tool_call></tool_call>"})],
        ),
        ("llama", 'I see. {"name": "look", "parameters": {"where": "up"}}', "I see.", LOOK),
        (
            "llama",
            '{"name":"look","parameters":{"where":"up"}}; {"name":"go","parameters":{}}',
            "",
            GO,
        ),
        ("llama", '{"name": "look", "parameters": "{\\"where\\": \\"up\\"}"}', "", LOOK),
        ("mistral", 'Hm[TOOL_CALLS][{"name":"look","arguments":{"where":"up"}}]', "Hm", LOOK),
        ("mistral", '[TOOL_CALLS] {"name":"look","arguments":{"where":"up"}}', "", LOOK),
        (
            "mistral",
            '[TOOL_CALLS] [{"name":"look","arguments":{"where":"up"}},'
            ' {"name":"go","arguments":""}]',
            "",
            GO,
        ),
        ("named", '[TOOL_CALLS]look[ARGS]{"where":"up"}[TOOL_CALLS]go[ARGS]{}', "", GO),
        (
            "nested",
            '<call>{"type":"function","function":{"name":"look","args":{}}}</call>',
            "",
            None,
        ),
        ("coder", f"So.\n{CODER}", "So.", LOOK),
        ("coder", CODER.removeprefix("<tool_call>\n"), "", LOOK),  # as some policies forget
        ("coder", f"{CODER} <tool_call><function=go> {ENDS}", "", GO),
    ],
)
def test_parser_keeps_calls_in_order_with_text(
    form: str, text: str, said: str, calls: list[Any] | None
) -> None:
    assert FORMS[form].read(text) == (said, [("look", {})] if calls is None else calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen", "no call at all"),
        ("qwen", '<tool_call>{"name": "look", "arguments": {}}</tool_call><tool_call>{broken'),
        ("qwen", '<tool_call>{"name": "look", "arguments": {}} and</tool_call>'),
        ("qwen", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "look"}</tool_call>'),
        ("qwen", '<tool_call>{"name": "x", "arguments": {"a": NaN}}</tool_call>'),
        ("qwen", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1} b"}</tool_call>'),
        ("qwen", '<tool_call>{"name": "x", "arguments": [1]}</tool_call>'),
        ("qwen", "<tool_call>" + "[" * 100_000),
        ("qwen", "<tool_call>[]</tool_call>"),
        ("llama", 'The answer: {"value": 5}'),
        ("llama", '{"name": "x", "parameters": {"name": "y", "parameters": {}}'),  # nor "y"
        ("llama", "{" * 5000),
        ("mistral", '[TOOL_CALLS] [{"name": "look", "arguments": {"where": "up"}}'),
        ("mistral", '[{"name": "look", "arguments": {}}]'),  # without the mark
        ("named", "[TOOL_CALLS]look[ARGS]{"),
        ("named", "[TOOL_CALLS][ARGS]{}"),
        ("coder", CODER.removesuffix(ENDS)),
        ("coder", CODER.replace("\nup", "").replace("where>", "where")),
        ("coder", "<function=" * 3000),
    ],
)
def test_unreadable_calls_are_kept_as_text(form: str, text: str) -> None:
    assert FORMS[form].read(text) == (text.strip(), [])


def test_tagged_arguments_take_their_schema_types() -> None:
    kinds: dict[str, Any] = {
        "text": {"type": "string"},
        "either": {"type": ["string", "integer"]},
        "number": {"type": "integer"},
        "truth": {"type": "boolean"},
        "list": {"type": "array"},
        "perhaps": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "unsaid": {},
    }
    given = dict(text="5", either="5", number="5", truth="True", list='[1, "a"]', perhaps="None")
    given |= {"unsaid": "5", "unknown": "5"}
    told = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in given.items())
    tools = [{"function": {"name": "look", "parameters": {"properties": kinds}}}]
    read = FORMS["coder"].read(f"<tool_call><function=look>{told}{ENDS}", tools)
    typed = {"number": 5, "truth": True, "list": [1, "a"], "perhaps": None}
    assert read == ("", [("look", given | typed)])
    odd = f"<tool_call><function=look><parameter=number>\n five\n\n</parameter>{ENDS}"
    assert FORMS["coder"].read(odd, tools) == ("", [("look", {"number": " five\n"})])


@pytest.mark.parametrize(
    ("full", "bare"),
    [
        ("<tool_call>something</tool_call>", "<tool_call></tool_call>"),
        (f"<call>{NAME}({KEYS[0]}={VALUES[0]})</call>", f"<call>{NAME}()</call>"),
        (f"{NAME} {ARGUMENTS}", f"{NAME} {{}}"),  # as Python writes it
        ("[] [1] {}", "[]"),
    ],
)
def test_unreadable_call_form_is_refused_by_name(full: str, bare: str) -> None:
    with pytest.raises(ValueError, match="name and arguments are not found in"):
        CallForm.of(full, bare)


@pytest.mark.parametrize(
    "value", ["[" * 64 + "]" * 64, '{"a":' * 993 + "1" + "}" * 993, "1e999", "NaN", "9" * 5000]
)
def test_nonstandard_json_arguments_are_no_call(value: str) -> None:
    text = f'{{"name": "look", "arguments": {{"x": {value}}}}}'
    assert CallForm().read(text) == (text, [])


def test_arguments_of_63_levels_are_read() -> None:
    text = f'{{"name": "look", "arguments": {{"x": {"[" * 62 + "]" * 62}}}}}'
    assert [name for name, _ in CallForm().read(text)[1]] == ["look"]
