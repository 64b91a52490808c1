"""The action language of web pages."""

import pytest

from envhub.web.actions import (
    MAX_TEXT_CHARS,
    NO_FENCE,
    POINTER_KINDS,
    InvalidAction,
    WebAction,
    WebActionType,
    describe,
    fenced,
    parse,
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("click [12]", WebAction(kind=WebActionType.CLICK, element=12)),
        ("click[12]", WebAction(kind=WebActionType.CLICK, element=12)),
        ("hover [3]", WebAction(kind=WebActionType.HOVER, element=3)),
        (
            "type [7] [blue socks] [1]",
            WebAction(kind=WebActionType.TYPE, element=7, text="blue socks", enter=True),
        ),
        (
            "type [7] [blue socks]",
            WebAction(kind=WebActionType.TYPE, element=7, text="blue socks", enter=True),
        ),
        ("type [7] [a [b] c] [0]", WebAction(kind=WebActionType.TYPE, element=7, text="a [b] c")),
        ("type [7] [1] [0]", WebAction(kind=WebActionType.TYPE, element=7, text="1")),
        ("type [7] [kept ] [0]", WebAction(kind=WebActionType.TYPE, element=7, text="kept ")),
        ("type [7] [] [0]", WebAction(kind=WebActionType.TYPE, element=7)),
        ("press [ctrl+a]", WebAction(kind=WebActionType.PRESS, text="Control+a")),
        ("press [Enter]", WebAction(kind=WebActionType.PRESS, text="Enter")),
        ("press [meta+shift+k]", WebAction(kind=WebActionType.PRESS, text="Control+Shift+k")),
        ("scroll [down]", WebAction(kind=WebActionType.SCROLL, text="down")),
        ("scroll up", WebAction(kind=WebActionType.SCROLL, text="up")),
        ("scroll [direction=down]", WebAction(kind=WebActionType.SCROLL, text="down")),
        ("new_tab", WebAction(kind=WebActionType.NEW_TAB)),
        ("tab_focus [1]", WebAction(kind=WebActionType.TAB_FOCUS, element=1)),
        ("close_tab", WebAction(kind=WebActionType.CLOSE_TAB)),
        (
            "goto [http://shopping.test/a]",
            WebAction(kind=WebActionType.GOTO, text="http://shopping.test/a"),
        ),
        ("go_back", WebAction(kind=WebActionType.GO_BACK)),
        ("go_forward", WebAction(kind=WebActionType.GO_FORWARD)),
        ("stop [42 km]", WebAction(kind=WebActionType.STOP, text="42 km")),
        ("stop", WebAction(kind=WebActionType.STOP)),
        ("stop []", WebAction(kind=WebActionType.STOP)),
    ],
)
def test_parse_reads_every_form(text, action):
    assert parse(text) == action


@pytest.mark.parametrize(
    "text",
    ["", "click", "click [x]", "click [1] [2]", "fly [1]", "type [1]", "press [NoSuchKey]",
     "press [Enter+a]", "scroll [left]", "goto []", "go_back [1]", "Click [1]", "[12]", "é" * 300,
     f"type [1] [{'x' * (MAX_TEXT_CHARS + 1)}]"],
)  # fmt: skip
def test_parse_refuses_malformed_actions(text):
    with pytest.raises(InvalidAction):
        parse(text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("drag [3] [4]", WebAction(kind=WebActionType.DRAG, element=3, target=4)),
        ("mouse_click [80,120]", WebAction(kind=WebActionType.MOUSE_CLICK, points=((80, 120),))),
        ("mouse_move [ 5 , 7 ]", WebAction(kind=WebActionType.MOUSE_MOVE, points=((5, 7),))),
        ("mouse_drag [1,2][3,4] [5,6]",
         WebAction(kind=WebActionType.MOUSE_DRAG, points=((1, 2), (3, 4), (5, 6)))),
    ],
)  # fmt: skip
def test_parse_accepts_pointer_actions_only_when_offered(text, action):
    assert parse(text, POINTER_KINDS) == action
    with pytest.raises(InvalidAction):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["mouse_click", "mouse_click [80]", "mouse_click [-1,2]", "mouse_click [1.5,2]",
     "mouse_click [1,2] [3,4]", "mouse_move [1,99999]", "mouse_drag [1,2]",
     "mouse_drag " + "[1,2] " * 33],
)  # fmt: skip
def test_parse_refuses_malformed_points(text):
    with pytest.raises(InvalidAction):
        parse(text, POINTER_KINDS)


def test_fenced_returns_the_first_block():
    assert fenced("Let me see ```click [1]``` or ```click [2]```") == "click [1]"


def test_fenced_requires_backticks():
    with pytest.raises(InvalidAction) as error:
        fenced("click [1]")
    assert str(error.value) == NO_FENCE


@pytest.mark.parametrize(
    "text",
    ["type [7] [a [b]] [0]", "click [3]", "stop []", "press [Tab]", "drag [3] [4]",
     "mouse_click [80,120]", "mouse_drag [1,2] [3,4]"],
)  # fmt: skip
def test_describe_inverts_parse(text):
    assert describe(parse(text, frozenset(WebActionType))) == text
