"""Laws of actions and observations as texts."""

import string
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)
from hypothesis import given
from hypothesis import strategies as st

from envhub.env import action_text
from envhub.interop.gym_game import (
    NoText,
    check_actions,
    describe,
    observation_text,
    parse_action,
    parse_whole,
    write_action,
)
from envhub.interop.texts import BadAction

SPACES: list[Space[Any]] = [
    Discrete(3, start=-1),
    Discrete(5, start=250, dtype=np.uint8),
    Discrete(4, start=-(2**40)),
    Box(-1, 1, (2,)),
    Box(-np.inf, np.inf, ()),
    Box(0, 255, (2, 2), np.uint8),
    Box(np.array([0.1, -3]), np.array([0.1, 7]), dtype=np.float64),
    MultiDiscrete([3, 2], start=[-1, 5]),
    MultiDiscrete(np.array([[2, 2], [3, 3]])),
    MultiBinary(3),
    MultiBinary([2, 2]),
    Tuple([Discrete(2, start=-1), Text(5)]),
    Dict(turn=Discrete(2), push=Box(0, 1, (2,), np.float16)),
    Sequence(Discrete(3)),
    OneOf([Discrete(2), Box(0, 1, (1,))]),
    Text(20, charset=string.printable),
]


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_every_legal_action_has_a_text(space: Space[Any]) -> None:
    check_actions(space)
    space.seed(7)
    for _ in range(50):
        said = write_action(space.sample(), space)
        played = parse_action(action_text(f"Thought: yes.\nAction: {said}"), space)
        assert space.contains(played)
        assert write_action(played, space) == said
    assert describe(space)


@pytest.mark.parametrize("space", SPACES, ids=repr)
@given(text=st.one_of(st.text(max_size=30), st.from_regex(r"[\[\]{}0-9,.\-+e\"a]{0,12}")))
def test_no_illegal_action_is_played(space: Space[Any], text: str) -> None:
    try:
        played = parse_action(text, space)
    except BadAction:
        return
    assert space.contains(played)


NASTY = {
    "many digits": "9" * 5_000,
    "zeros": "0" * 5_000 + "9",
    "deep": "[" * 100_000,
    "deep and whole": "[" * 600 + "]" * 600,
    "huge": "1" + "0" * 400,
    "infinite": "[1e999, 1e999]",
    "no number": "[NaN, Infinity]",
    "half a character": "\ud800",
    "null": "\0",
    "long": "x" * 1_000_000,
    "keys": '{"turn": 1, "push": [0, 0], "more": 1}',
    "nothing": "",
}


@pytest.mark.parametrize("space", SPACES[:-1], ids=repr)
def test_a_hostile_text_is_a_bad_action(space: Space[Any]) -> None:
    for text in NASTY.values():
        with pytest.raises(BadAction):
            parse_action(text, space)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("-1", -1), ("+1", 1), ("007", 7), ("-007", -7), ("1.0", 1), ("-0", 0), (" 2 ", 2)),
        *(("0" * 5_000 + "3", 3), ("\u0663", 3), ("\uff11", 1), ("\u22122", -2)),
    ],
)
def test_spellings_of_whole_number_parse_alike(text: str, number: int) -> None:
    assert parse_whole(text) == number


@pytest.mark.parametrize(
    "text", ["", "-", "--1", "1.5", "1_0", "0x1", "\u00b2", "1e3", "one", "1 2", ".", "\u2160"]
)
def test_malformed_whole_number_is_refused(text: str) -> None:
    with pytest.raises(BadAction, match="is not a whole number"):
        parse_whole(text)


@pytest.mark.parametrize("text", ["2", "one", "9" * 5_000])
def test_number_out_of_range_is_answered_with_the_range(text: str) -> None:
    with pytest.raises(BadAction, match="must be a whole number from -1 to 1"):
        parse_action(text, Discrete(3, start=-1))


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (Box(-1, 1, (1,)), "0.5", np.array([0.5], np.float32)),
        (Box(0, 255, (2,), np.uint8), "[255, 1.0]", np.array([255, 1], np.uint8)),
        (MultiDiscrete([2, 2]), "```json\n[0, 1]\n```", np.array([0, 1])),
        (MultiBinary(2), "[true, 0]", np.array([1, 0], np.int8)),
    ],
)
def test_parsed_array_has_its_spaces_shape_and_type(
    space: Space[Any], text: str, action: np.ndarray
) -> None:
    played = parse_action(text, space)
    assert (played.dtype, played.tolist()) == (space.dtype, action.tolist())


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (Box(0, 255, (1,), np.uint8), "[256]"),  # It would be 0 in 8 bits.
        (Box(0, 255, (1,), np.uint8), "[-1]"),  # It would be 255 in 8 bits.
        (Box(-np.inf, np.inf, (1,)), "[1e39]"),  # infinite in 32 bits
        (Box(-1, 1, (2,)), "[0]"),
        (Box(-1, 1, (2,)), "[[0, 0]]"),
        (MultiDiscrete([2, 2]), "[0.5, 0]"),
        (MultiBinary(2), "[0, 2]"),
        (Dict(a=Discrete(2)), '{"a": 99999999999999999999999}'),
        (OneOf([Discrete(2)]), "[-1, 0]"),
    ],
)
def test_value_beyond_its_space_is_refused(space: Space[Any], text: str) -> None:
    with pytest.raises(BadAction):
        parse_action(text, space)


def test_text_action_may_hold_spaces_or_the_marker() -> None:
    space = Text(20, charset=string.printable)
    for action in (" a", "a\n", '"a"', "Action: b", "x Action: "):
        assert parse_action(action_text(write_action(action, space)), space) == action
    assert parse_action('say "hi"', space) == 'say "hi"'


@pytest.mark.parametrize(
    "space",
    [
        Graph(Box(0, 1, (1,)), None),
        Sequence(Discrete(2), stack=True),
        Tuple([Discrete(2), Graph(Box(0, 1, (1,)), None)]),
    ],
    ids=repr,
)
def test_space_without_text_form_is_named(space: Space[Any]) -> None:
    with pytest.raises(NoText, match=r"(Graph|stack=True) has no text form"):
        check_actions(space)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("as it is", "as it is"),
        (np.int64(36), "36"),
        (np.array([0.5, -1], np.float32), "[0.5, -1.0]"),
        ({"sum": np.int8(4), "ace": np.bool_(True)}, '{"sum": 4, "ace": true}'),
        ((1, np.float64(0.25), [np.str_("a")]), '[1, 0.25, ["a"]]'),
        ({"all": np.arange(2_000)}, f'{{"all": {[*range(2_000)]}}}'),  # no "..." in the middle
    ],
)
def test_an_observation_is_shown_whole(observation: Any, text: str) -> None:
    assert observation_text(observation) == text


def test_observation_without_text_form_is_named() -> None:
    class Board:
        pass

    with pytest.raises(NoText, match="a value of type Board has no text form"):
        observation_text({"board": Board()})
