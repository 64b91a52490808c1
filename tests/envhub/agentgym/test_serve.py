"""Laws of AgentGym's routes: its clients' own traffic, against a hub over HTTP."""

import struct
import zlib
from base64 import b64decode

import httpx
import pytest

from envhub.agentgym.dialects import SCIWORLD, WEBARENA
from envhub.agentgym.replies import ServedInstance, reset_reply
from envhub.conversations import CONVERSATIONS
from envhub.envs.sciworld.catalogue import from_agentgym
from tests.envhub.agentgym.agentgym_clients import (
    DIRECT,
    IdClient,
    make_client,
    native_item,
    native_name,
    phrase,
    serve_envs,
)
from tests.marks import WITH_PROCESSES, long_for

QUICK = ("textcraft", "babyai", "maze", "wordle")
INDICES = {"textcraft": 3, "babyai": 83, "maze": 4, "wordle": 11, "sciworld": 2936}
BEST_SCORES = {"sciworld": 100}


@pytest.fixture(scope="module")
def hub():
    with serve_envs(*QUICK) as url:
        yield url


def play_with_twin(name: str, hub: str, index: int) -> None:
    """Play an item as AgentGym's client and as a native session, side by side, to success."""
    best = BEST_SCORES.get(name, 1)
    client = make_client(name, hub)
    make_client(name, hub)  # A second client that stays unused.
    with httpx.Client(base_url=hub, **DIRECT) as native:
        item_id = native_item(name, index)
        body = {"env": native_name(name), "item_id": item_id, "style": "agentgym"}
        opened = native.post("/v1/sessions", json=body)
        assert opened.status_code == 201, opened.text
        path = f"/v1/sessions/{opened.json()['session_id']}"
        client.reset(index)
        told = client.reset(index)
        if name == "maze":  # the rest of both is put before it by the client
            told = CONVERSATIONS[name].first_observation(told)
        assert told == opened.json()["observation"] or name == "wordle"
        score, is_done, seq = 0, False, 0
        while not is_done:
            seq += 1
            hint = native.get(f"{path}/hint").json()
            text = phrase(name, hint["expert_action"])
            twin = native.post(f"{path}/step", json={"action": text, "seq": seq}).json()
            observation, score, is_done = client.step(text)
            assert observation == twin["observation"]
            assert (score, is_done) == (twin["reward"] * best, twin["done"])
        assert score == best
        native.delete(path)
    client.close()


@pytest.mark.parametrize("name", QUICK)
def test_clients_play_an_episode_to_success(hub, name):
    play_with_twin(name, hub, INDICES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_for(["sqlgym", "searchqa", "sciworld", "webarena"], WITH_PROCESSES)
)
def test_clients_in_a_worker_play_an_episode_to_success(name):
    with serve_envs(name) as hub:
        play_with_twin(name, hub, INDICES.get(name, 0))


def test_instances_are_large_numbers_that_differ(hub):
    numbers = {make_client("maze", hub).wire.number or 0 for _ in range(5)}
    assert len(numbers) == 5
    assert all(0 <= number < 2**53 for number in numbers)
    assert max(numbers) > 2**40


def test_step_after_the_end_is_an_error_with_status_200(hub):
    client = make_client("maze", hub)
    client.reset(4)
    steps = [client.wire.post("step", {"action": "move up"}) for _ in range(52)]
    assert steps[-3]["reward"] == 0
    assert steps[-2] == {"observation": "Failure\n", "reward": -1, "done": True}
    text = f"The task with environment {client.wire.number} has finished."
    assert steps[-1] == {"error": text}


def test_observation_after_the_end_is_an_error_until_reset(hub):
    client = make_client("wordle", hub)
    first = client.reset(0)
    for _ in range(6):
        assert client.wire.get("observation") != {}
        client.step("Action: nothing")
    over = {"error": f"The task with environment {client.wire.number} has finished."}
    assert client.wire.get("observation") == over
    assert client.wire.get("filtered_vocab") == over
    client.reset(0)
    assert client.wire.get("observation") == first


def test_observation_before_reset_is_an_error_with_status_200(hub):
    client = make_client("maze", hub)
    assert client.wire.get("observation") == {"error": "'observation'"}


def test_webarena_close_succeeds_for_any_instance():
    with serve_envs("webarena") as hub:
        client = make_client("webarena", hub)
        client.close()
        client.close()


def test_webarena_reset_returns_page_without_prompt():
    first = "OBSERVATION:\nTab 0 (current): Shop\n\n[1] link 'URL: /'\nURL: http://shop.test/\n"
    first += "OBJECTIVE: Find the shop.\nPREVIOUS ACTION: None"
    instance = ServedInstance(item_id="Shopping-test-0", first_observation=first)
    assert reset_reply(WEBARENA, 1, instance) == {
        "observation": "Tab 0 (current): Shop\n\n[1] link 'URL: /'",
        "sites": ["Shopping"],
        "object": "Find the shop.",
    }


def test_reset_of_sciworld_names_task_and_variation():
    item_id = from_agentgym(700)
    instance = ServedInstance(item_id=item_id, first_observation="Measure.\nA room.")
    reply = reset_reply(SCIWORLD, 1, instance)
    assert isinstance(reply, dict)
    assert (reply["task_name"], reply["var_num"]) == ("measure-melting-point-known-substance", 40)
    assert (reply["task_description"], reply["observation"]) == ("Measure.", "A room.")


def test_unknown_and_unreset_instances_return_errors_with_status_200(hub):
    client = IdClient("babyai", f"{hub}/agentgym/babyai")
    number = str(client.wire.number)
    assert client.wire.post("step", {"action": "turn left"}) == {"error": number}
    assert client.wire.get("observation")["observation"] == "Environment not initialized"
    client.close()
    gone = {"error": f"The id {client.wire.number} is not valid."}
    assert client.wire.post("step", {"action": "turn left"}) == gone
    assert client.wire.post("reset", {"data_idx": 0}) == gone
    assert client.wire.get("observation") == gone
    assert client.wire.post("close", {}) is False


def test_item_out_of_range_fails_and_keeps_the_instance(hub):
    client = make_client("maze", hub)
    assert "error" in client.wire.post("reset", {"game": 26})
    assert client.reset(0).startswith("The goal is at position 8, 6.")


def test_textcraft_answers_the_reset_in_full(hub):
    client = make_client("textcraft", hub)
    reply = client.wire.post("reset", {"data_idx": 0})
    assert reply["id"] == client.wire.number
    assert (reply["reward"], reply["done"]) == (0, False)
    assert client.wire.get("observation") == reply["observation"]
    assert client.wire.post("reset", {}) == reply
    assert client.wire.post("step", {"action": "nonsense"}) == {
        "observation": "Could not execute nonsense",
        "reward": 0,
        "done": False,
    }
    assert client.wire.get("observation") == "Could not execute nonsense"


def test_babyai_observation_names_the_goal_again(hub):
    client = make_client("babyai", hub)
    goal = client.reset(0).partition("\n")[0]
    client.step("Action: turn left")
    seen = client.wire.get("observation")
    assert seen["observation"].startswith(f"{goal}\n")
    assert (seen["score"], seen["done"], seen["deleted"]) == (0, False, False)


@pytest.mark.parametrize(
    ("verb", "body"),
    [("create", None), ("step", {}), ("step", {"id": 1}), ("reset", {"id": "x"}), ("close", [])],
)
def test_malformed_bodies_are_422(hub, verb, body):
    answer = httpx.post(f"{hub}/agentgym/textcraft/{verb}", json=body, **DIRECT)
    assert answer.status_code == 422


def test_greeting_names_the_environment(hub):
    answer = httpx.get(f"{hub}/agentgym/textcraft", **DIRECT)
    assert answer.json() == "This is environment TextCraft."


def test_full_hub_refuses_a_create():
    with serve_envs("maze", capacity=2) as hub:
        clients = [make_client("maze", hub) for _ in range(2)]
        full = httpx.post(f"{hub}/agentgym/maze/create", **DIRECT)
        assert full.status_code == 429
        assert "Retry-After" in full.headers
        clients[0].wire.post("close", {})
        make_client("maze", hub)


def test_routes_of_agentgyms_pages_answer(hub):
    for name in ("textcraft", "maze", "wordle"):
        client = make_client(name, hub)
        assert "error" in client.wire.get("detail") or name == "textcraft"
        client.reset(3)
        client.step("Action: move left")
        told = client.wire.get("detail")
        assert {"observation", "reward", "done", "deleted"} <= set(told)
        assert told["observation"] == client.wire.get("observation")
    moves = ["move left", "move right", "move up", "move down"]
    assert httpx.get(f"{hub}/agentgym/maze/available_actions", **DIRECT).json() == moves
    client = make_client("babyai", hub)
    client.reset(1)
    picture = client.wire.post("render", {})
    content = b64decode(picture.removeprefix("data:image/png;base64,"), validate=True)
    width, height = struct.unpack(">II", content[16:24])
    at = content.index(b"IDAT")
    rows = zlib.decompress(content[at + 4 : at + 4 + struct.unpack(">I", content[at - 4 : at])[0]])
    assert len(rows) == height * (1 + 3 * width)
    line = 1 + 3 * width
    starts = (at + i for at in range(0, len(rows), line) for i in range(1, line, 3))
    assert len({rows[start : start + 3] for start in starts}) > 1


@pytest.mark.long
@pytest.mark.slow
def test_scienceworld_page_gets_every_detail_it_requests():
    with serve_envs("sciworld") as url:
        client = make_client("sciworld", url)
        assert "error" in client.wire.get("goals")
        first = client.reset(2936)
        assert client.wire.get("observation") == first.partition("\n")[2]
        assert isinstance(client.wire.get("goals")["goals"], str)
        assert len(client.wire.get("action_hint")["possible_actions"]) > 10
        state = client.wire.get("state")
        assert len(state["possible_objects"]) == 10
        assert state["environment_info"]["task_name"] == "find-living-thing"
        assert client.wire.get("task_description")["task_description"] in first
        assert client.wire.get("object_tree")["object_tree"]
        client.step("Action: look around")
        assert client.wire.get("detail")["score"] == 0
        client.close()


def test_malformed_bodies_get_fastapi_error_details(hub):
    answer = httpx.post(f"{hub}/agentgym/maze/reset", json={"id": "x"}, **DIRECT)
    assert answer.status_code == 422
    detail = answer.json()["detail"]
    assert [each["loc"] for each in detail] == [["body", "id"], ["body", "game"]]
    assert {"type", "loc", "msg", "input"} <= set(detail[0])
    assert detail[0]["input"] == "x"


def test_long_actions_are_answered(hub):
    client = make_client("maze", hub)
    client.reset(3)
    assert client.wire.post("step", {"action": "x" * 200_000})["reward"] == 0
