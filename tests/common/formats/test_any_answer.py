"""Laws of reading an action in any answer: it is found or not, soon, and nothing is raised."""

import time

import pytest

from common.config.actor import AgentFormat
from common.formats.answers import ANY_FORM, read_any, read_react, sent
from tests.bounds import at_most
from tests.envhub.any_text import TEXTS

MAX_CPU_S = 2.0  # A quadratic reader takes hours for the longest of them.
CALLS = {
    "call spaces": "<tool_call>" + " " * 1_000_000 + "x",
    "call names": f"<function={'x' * 1_000_000}",
    "call spaces behind": f"<function=a{' ' * 1_000_000}x",
    "many calls": "<function=a>" * 80_000,
    "many parameters": f"<function=a>{'<parameter=k>v</parameter>' * 30_000}</function>",
    "many objects": '{"name":"a","arguments":{}} ' * 30_000,
    "deep arguments": f'{{"name": "a", "arguments": {{"x": {"[" * 993 + "]" * 993}}}}}',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TEXTS | CALLS))
def test_any_answer_is_read_in_linear_time(name: str) -> None:
    text = (TEXTS | CALLS)[name]
    began_s = time.process_time()
    for form in ANY_FORM:
        _, calls = form.read(text)
        told = sent(calls, ["a", "submit"], has_one=False)
        assert told is None or told.encode()
    assert read_react(text) is None or "Action:" in text
    assert isinstance(read_any(AgentFormat.FUNCTION_CALL, text), str)
    assert time.process_time() - began_s < at_most(MAX_CPU_S)
