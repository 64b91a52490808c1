"""Laws of saved sessions: one that loads the state of another continues as that one would."""

import json
import zlib
from typing import Any

import pytest

from tests.envhub.conftest import Hub

OUTSIDERS = ("make_saving", "make_saving_task", "make_worker")
ITEMS = {
    "babyai": "GoToObjMazeS7-train-3",
    "nim": "OnePile-train-1",
    "textcraft": "depth2-train-4",
    "saving": "any-train-0",
    "saving_task": "any-train-0",
}


@pytest.fixture(scope="module")
def hubs(serve_hubs) -> tuple[Hub, Hub]:
    return serve_hubs(*OUTSIDERS), serve_hubs(*OUTSIDERS)


def step(hub: Hub, path: str, seq: int, action: str, **more: object) -> dict[str, Any]:
    answer = hub.client.post(f"{path}/step", json={"action": action, "seq": seq, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def load(hub: Hub, path: str, saved: str) -> tuple[int, str]:
    answer = hub.client.post(f"{path}/load", json={"saved": saved})
    return answer.status_code, answer.text


def actions_of(hub: Hub, env: str) -> list[str]:
    """Return the actions of an episode, of which every second one is refused where possible."""
    path = hub.open(env, ITEMS[env])
    actions: list[str] = []
    while True:
        hint = hub.client.get(f"{path}/hint").json()
        expert = hint["expert_action"] or hint["valid_actions"][-1]
        for action in ([] if env == "nim" else ["no such action"]) + [expert]:
            actions.append(action)
            if step(hub, path, len(actions), action)["done"]:
                return actions


@pytest.mark.slow
@pytest.mark.parametrize("env", ITEMS)
def test_loaded_state_continues_at_another_hub_after_every_step(hubs, env: str):
    first, second = hubs
    actions = actions_of(first, env)
    path = first.open(env, ITEMS[env])
    answers = [step(first, path, seq, each, save=True) for seq, each in enumerate(actions, 1)]
    assert "saved" not in answers[-1]
    plain = [{k: v for k, v in each.items() if k != "saved"} for each in answers]
    for turn, answer in enumerate(answers[:-1], 1):
        other = second.open(env, ITEMS[env])
        assert load(second, other, answer["saved"]) == (204, "")
        rest = [step(second, other, seq, each) for seq, each in enumerate(actions[turn:], 1)]
        assert rest == plain[turn:]
        second.client.delete(other)


def test_loaded_session_answers_an_oversized_action_as_before(hubs):
    first, second = hubs
    path = first.open("saving_task", "any-train-0")
    step(first, path, 1, "go")
    saved = step(first, path, 2, "go", save=True)["saved"]
    other = second.open("saving_task", "any-train-0")
    assert load(second, other, saved)[0] == 204
    answer = step(second, other, 1, "", num_bytes=99)
    assert (answer["reward"], answer["state"], answer["is_valid"]) == (0.2, "step 2", False)


def test_repeated_step_returns_the_same_state(hubs):
    path = hubs[0].open("saving_task", "any-train-0")
    answers = [step(hubs[0], path, 1, "go", save=True) for _ in range(2)]
    assert answers[0] == answers[1]
    assert step(hubs[0], path, 2, "go")["observation"] == "step 2"


def test_created_session_names_what_it_can(hubs):
    told = {}
    for env in ("saving", "saving_task", "fragile"):
        body = {"env": env, "item_id": "any-train-0"}
        told[env] = hubs[0].client.post("/v1/sessions", json=body).json()
    assert [each.get("can_save", False) for each in told.values()] == [True, True, False]
    assert told["fragile"]["is_repeatable"]


@pytest.mark.parametrize("env", ["saving", "saving_task"])
@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("large", "the state has 2097"),
        ("tuple", "data that JSON changes"),
        ("number", "data that JSON changes"),
        ("nan", "data that JSON changes"),
        ("bytes", "Object of type bytes is not JSON serializable"),
        ("raise in save", "KeyError: 'nothing to save'"),
    ],
)
def test_state_that_cannot_be_saved_is_named_and_the_episode_continues(hubs, env, action, reason):
    path = hubs[0].open(env, "any-train-0")
    answer = step(hubs[0], path, 1, action, save=True)
    assert "saved" not in answer
    assert reason in answer["unsaved"]
    assert step(hubs[0], path, 2, "go", save=True)["observation"] == "step 2"
    hubs[0].client.delete(path)


def test_environment_without_save_names_it(hubs):
    path = hubs[0].open("fragile", "any-train-0")
    assert step(hubs[0], path, 1, "go", save=True)["unsaved"] == "fragile has no save() and load()"
    hubs[0].client.delete(path)


@pytest.mark.slow
def test_hanging_save_ends_only_its_worker(hubs):
    path = hubs[0].open("saving", "any-train-0")
    hubs[0].session(path).episode._timeout_s = 1.0
    answer = hubs[0].client.post(
        f"{path}/step", json={"action": "hang in save", "seq": 1, "save": True}
    )
    assert answer.status_code == 504
    assert step(hubs[0], hubs[0].open("saving", "any-train-0"), 1, "go")["reward"] == 0.1


def summed(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x} {body}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda saved: saved[:-1], "is damaged: its checksum differs"),
        (lambda saved: saved.replace("2", "3"), "is damaged: its checksum differs"),
        (lambda saved: "", "is damaged: its checksum differs"),
        (lambda saved: summed("[]"), "is malformed"),
        (lambda saved: summed("{"), "is malformed"),
        (lambda saved: summed("[" * 100_000), "is malformed"),
        (lambda saved: changed(saved, format=99), "has format=99, not 1"),
        (lambda saved: changed(saved, item_id="any-train-1"), "has item_id='any-train-1'"),
        (lambda saved: changed(saved, seed=5), "has seed=5, not 0"),
        (lambda saved: changed(saved, env="nim"), "has env='nim', not 'saving_task'"),
        (lambda saved: changed(saved, answer=7), "is malformed"),
    ],
)
def test_damaged_state_is_refused_and_the_session_begins(hubs, change, reason):
    path = hubs[0].open("saving_task", "any-train-0")
    saved = step(hubs[0], path, 1, "go", save=True)["saved"]
    other = hubs[1].open("saving_task", "any-train-0")
    status, text = load(hubs[1], other, change(saved))
    assert (status, reason in text) == (422, True), text
    assert step(hubs[1], other, 1, "go")["observation"] == "step 1"


def changed(saved: str, **values: object) -> str:
    return summed(json.dumps({**json.loads(saved[9:]), **values}))


def test_state_that_the_environment_cannot_load_is_a_named_failure(hubs):
    path = hubs[0].open("saving_task", "any-train-0")
    saved = step(hubs[0], path, 1, "go", save=True)["saved"]
    other = hubs[1].open("saving_task", "any-train-0")
    status, text = load(hubs[1], other, changed(saved, env_state=[0, {}]))
    assert (status, "KeyError: 'num_steps'" in text) == (500, True), text


def test_state_is_loaded_only_before_the_first_step(hubs):
    path = hubs[0].open("saving_task", "any-train-0")
    saved = step(hubs[0], path, 1, "go", save=True)["saved"]
    assert load(hubs[0], path, saved)[0] == 409
    assert step(hubs[0], path, 2, "go")["observation"] == "step 2"


def test_saved_states_are_counted(hubs):
    hub = hubs[0]
    before = hub.client.get("/healthz").json()
    path = hub.open("saving_task", "any-train-0")
    saved = step(hub, path, 1, "go", save=True)["saved"]
    load(hub, hub.open("saving_task", "any-train-0"), saved)
    after = hub.client.get("/healthz").json()
    names = ("num_saved", "num_saved_bytes", "num_loaded")
    grown = [after[name] - before.get(name, 0) for name in names]
    assert grown == [1, len(saved), 1]
    assert "envhub_saved_bytes_total" in hub.client.get("/metrics").text
