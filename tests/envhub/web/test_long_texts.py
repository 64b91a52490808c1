"""Laws of long texts in the language of web pages: each letter is read a few times at most."""

import contextlib
import time

import pytest

from envhub.envs.textcraft.env import read_command
from envhub.web.actions import FORMS, InvalidAction, WebActionType, parse
from envhub.web.tree import compact_lines

LONG = 200_000  # A quadratic pattern takes minutes for so many characters, a linear one no time.
MAX_CPU_S = 1.0
TAILS = [
    " " * LONG + "x",
    f" [{' ' * LONG}x",
    f" [1]{' ' * LONG}x",
    f" [1] [{' ' * LONG}x",
    f" 1{' ' * LONG}x",
    f" up{' ' * LONG}x",
    f" direction{' ' * LONG}x",
    f"[1,1]{' ' * LONG}x",
    f" [{'] ' * LONG}x",
    f" [1] [a{'] [1' * (LONG // 4)}",
]


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_action_with_much_space_parses_in_linear_time(kind: WebActionType) -> None:
    began_s = time.process_time()
    for tail in TAILS:
        with contextlib.suppress(InvalidAction):
            parse(kind.value + tail, frozenset(WebActionType))
    assert time.process_time() - began_s < MAX_CPU_S


@pytest.mark.parametrize(
    "text",
    [
        f"craft 1 stick{' ' * LONG}x",
        f"craft {' ' * LONG}x",
        f"craft 1 a using{' ' * LONG}\n",
        f"craft 1 a{' using' * LONG}",
        f"get 1{' ' * LONG}x",
    ],
)
def test_command_with_much_space_parses_in_linear_time(text: str) -> None:
    began_s = time.process_time()
    read_command(text, "got")
    assert time.process_time() - began_s < MAX_CPU_S


def test_a_name_ends_before_the_first_using() -> None:
    command = read_command("craft 2 oak planks using 1 a using 1 b", "got")
    assert command[:4] == ("craft", 2, "oak planks", ((1, "a using 1 b"),))
    told = read_command("craft 2 oak  planks  using  1 oak log, 2 stick", "got")
    assert told[:4] == ("craft", 2, "oak  planks", ((1, "oak log"), (2, "stick")))


def test_a_page_without_elements_has_no_lines() -> None:
    assert compact_lines([], (), ids=True) == []
