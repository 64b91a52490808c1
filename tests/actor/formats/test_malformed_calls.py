"""Laws of malformed calls: each is refused with a reason, in every form, and none is dropped."""

import warnings

import pytest

from common.formats.calls import KEYS, NAME, VALUES, CallForm
from tests.common.formats.test_calls import FORMS

PYTHON = CallForm.of(
    f"<|start|>[{NAME}({KEYS[0]}='{VALUES[0]}', {KEYS[1]}='{VALUES[1]}')]<|end|>",
    f"<|start|>[{NAME}()]<|end|>",
)
QUOTED = CallForm.of(
    f'<|call>call:{NAME}{{{KEYS[0]}:<|"|>{VALUES[0]}<|"|>,{KEYS[1]}:<|"|>{VALUES[1]}<|"|>}}<call|>',
    f"<|call>call:{NAME}{{}}<call|>",
)
SAMPLES = {  # form, and one call as a policy samples it
    "qwen": (
        FORMS["qwen"],
        '<tool_call>\n{"name": "go", "arguments": {"to": "up", "far": 2}}\n</tool_call>',
    ),
    "llama": (FORMS["llama"], '{"name": "go", "parameters": {"to": "up", "far": 2}}'),
    "mistral": (
        FORMS["mistral"],
        '[TOOL_CALLS] [{"name": "go", "arguments": {"to": "up", "far": 2}}]',
    ),
    "named": (FORMS["named"], '[TOOL_CALLS]go[ARGS]{"to": "up", "far": 2}'),
    "coder": (
        FORMS["coder"],
        "<tool_call>\n<function=go>\n<parameter=to>\nup\n</parameter>\n<parameter=far>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "python": (PYTHON, "<|start|>[go(to='up', far=2)]<|end|>"),
    "quoted": (QUOTED, '<|call>call:go{to:<|"|>up<|"|>,far:2}<call|>'),
}
VALUES_OF_FAR = [
    *("NaN", "Infinity", "1e999", "9" * 5000, "{[1]}", "{1: 2}", "lambda: 0", "**{}", "1j", "f()"),
    *("b'x'", "------1", "1" + "+1" * 500, "[" * 500, '{"a":' * 500, "", "'", '"', "\\", "\x00"),
]


def check(form: CallForm, text: str) -> list[tuple[str, dict[str, object]]]:
    """Return the calls in a text; a text with the name of a tool and no call has a reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said, calls = form.read(text)
        fault = form.fault(text)
    assert bool(calls) != bool(fault) or (not calls and not fault)
    if not calls:
        assert said == text.strip()
    return calls


@pytest.mark.parametrize("name", SAMPLES)
def test_malformed_call_has_no_exception_and_no_loss(name: str) -> None:
    form, one = SAMPLES[name]
    assert len(check(form, one)) == 1
    broken = [one.replace("2", value) for value in VALUES_OF_FAR]
    broken += [one.replace("up", value) for value in (*VALUES_OF_FAR, one, "</tool_call>")]
    broken += [one[:place] for place in range(0, len(one), 3)]
    broken += [one.replace("go", ""), one + one[: len(one) // 2], one * 3, one.replace("}", ",}")]
    for text in broken:
        check(form, text)
    assert len(check(form, one * 2)) in (0, 2)


@pytest.mark.parametrize("value", ["{[1]}", "1e999", "-1e999", "1j", "f()", "**{}"])
def test_python_argument_that_is_no_literal_has_a_reason(value: str) -> None:
    text = f"<|start|>[go(far={value})]<|end|>"
    assert check(PYTHON, text) == []
    assert PYTHON.fault(text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_quoted_number_beyond_json_has_a_reason(value: str) -> None:
    text = f"<|call>call:go{{far:{value}}}<call|>"
    assert check(QUOTED, text) == []
    assert QUOTED.fault(text)


def test_python_text_may_have_line_breaks_and_backslashes() -> None:
    (call,) = check(PYTHON, "<|start|>[go(to='a\nb', by='\\d')]<|end|>")
    assert call == ("go", {"to": "a\nb", "by": "\\d"})
