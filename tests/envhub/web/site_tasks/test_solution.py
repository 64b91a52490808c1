"""The expert of the web sites follows one known way."""

from envhub.web.actions import WebAction, WebActionType
from envhub.web.site_tasks.env import Solution
from tests.envhub.web.test_tree import nodes_of, row

NODES = nodes_of(row(-1, 0, "link", "Orders"), row(-1, 0, "textbox", "Search", in_view=0))


def following(*steps) -> Solution:
    return Solution(list(steps))


def test_click_names_the_element_of_the_page():
    step = {"do": "click", "role": "link", "name": "Orders"}
    assert following(step).next(NODES, only_in_view=True) == WebAction(
        kind=WebActionType.CLICK, element=0
    )


def test_expert_scrolls_to_an_element_out_of_view():
    step = {"do": "type", "role": "textbox", "name": "Search", "text": "mug", "enter": True}
    solution = following(step)
    scroll = solution.next(NODES, only_in_view=True)
    assert scroll is not None
    assert scroll.kind is WebActionType.SCROLL
    solution.follow(scroll, scroll)
    expected = WebAction(kind=WebActionType.TYPE, element=1, text="mug", enter=True)
    assert solution.next(NODES, only_in_view=False) == expected


def test_steps_run_in_order_and_end_with_the_answer():
    click = {"do": "click", "role": "link", "name": "Orders"}
    solution = following(click, {"do": "stop", "answer": "42"})
    first = WebAction(kind=WebActionType.CLICK, element=0)
    assert solution.next(NODES, only_in_view=False) == first
    solution.follow(first, first)
    assert solution.next(NODES, only_in_view=False) == WebAction(kind=WebActionType.STOP, text="42")


def test_expert_stops_once_it_leaves_path():
    solution = following({"do": "click", "role": "link", "name": "Orders"})
    expected = solution.next(NODES, only_in_view=False)
    assert expected is not None
    solution.follow(WebAction(kind=WebActionType.HOVER, element=1), expected)
    assert solution.next(NODES, only_in_view=False) == expected
    solution.follow(WebAction(kind=WebActionType.CLICK, element=1), expected)
    assert solution.next(NODES, only_in_view=False) is None


def test_expert_stops_at_a_missing_element():
    step = {"do": "click", "role": "link", "name": "Invoices"}
    assert following(step).next(NODES, only_in_view=False) is None
    assert following().next(NODES, only_in_view=False) is None
