"""Laws of the hub's routes and sessions, through real HTTP."""

import httpx
import pytest

from envhub.server import MAX_BODY_BYTES


@pytest.fixture
def hub(serve_hub):
    return serve_hub()


def test_hub_plays_a_whole_episode(hub):
    body = {"env": "babyai", "item_id": "GoToLocal-train-0", "style": "compact"}
    opened = hub.client.post("/v1/sessions", json=body)
    assert opened.status_code == 201
    assert opened.json()["observation"].startswith("goal: go to the green ball\n")
    path = f"/v1/sessions/{opened.json()['session_id']}"
    hint = hub.client.get(f"{path}/hint").json()
    assert hint["expert_action"] == "go to green ball 1"
    assert hint["expert_action"] in hint["valid_actions"]
    answer = hub.step(path, hint["expert_action"], 1).json()
    assert set(answer) == {"observation", "reward", "done", "is_valid"}
    assert (answer["reward"], answer["done"], answer["is_valid"]) == (1.0, True, True)
    assert hub.step(path, "turn left", 2).status_code == 409
    assert hub.client.delete(path).status_code == 204
    assert hub.client.delete(path).status_code == 404
    assert hub.client.get("/healthz").json()["num_sessions"] == 0


def test_catalogue_gives_sizes_turns_and_instructions(hub):
    catalogue = hub.client.get("/v1/envs").json()
    pickup = {"num_train": 1_000_000, "num_test": 1_000, "max_turns": 6}
    assert catalogue["babyai"]["subsets"]["PickupLoc"] == pickup
    assert set(catalogue["textcraft"]["instruction"]) == {"compact", "agentgym"}
    assert "Thought:" in catalogue["textcraft"]["instruction"]["agentgym"]


def test_repeated_seq_is_answered_from_memory(hub):
    path = hub.open()
    first = hub.step(path, "go", 1).json()
    assert hub.step(path, "go", 1).json() == first
    assert hub.step(path, "another text", 1).json() == first
    assert hub.step(path, "go", 2).json()["observation"] == "step 2"
    assert hub.client.get(f"{path}/render").json() == {"text": "2 steps", "fingerprint": "same"}


def test_last_step_of_an_episode_may_be_repeated(hub):
    path = hub.open()
    last = hub.step(path, "end", 1).json()
    assert last["done"]
    assert hub.step(path, "end", 1).json() == last


@pytest.mark.parametrize("seq", [2, 3, 100])
def test_wrong_seq_conflicts_and_executes_nothing(hub, seq):
    path = hub.open()
    assert hub.step(path, "go", seq).status_code == 409
    assert hub.step(path, "go", 1).json()["observation"] == "step 1"


def test_old_seq_conflicts(hub):
    path = hub.open()
    hub.step(path, "go", 1)
    hub.step(path, "go", 2)
    assert hub.step(path, "go", 1).status_code == 409


def test_session_expires_when_its_lease_runs_out(hub):
    used, unused = hub.open(), hub.open()
    hub.clock.now_s += 40.0
    assert hub.step(used, "go", 1).status_code == 200
    hub.clock.now_s += 40.0  # 80 s after opening, 40 s after the step; the lease is 60 s
    assert hub.step(unused, "go", 1).status_code == 404
    assert hub.step(used, "go", 2).status_code == 200
    assert hub.sessions.expire() == 1
    assert len(hub.sessions) == 1


def test_failing_session_is_dropped_and_leaves_others_unharmed(hub):
    failing, other = hub.open(), hub.open()
    failed = hub.step(failing, "raise", 1)
    assert failed.status_code == 500
    assert "a bug in the environment" in failed.json()["detail"]
    assert hub.step(failing, "go", 1).status_code == 404
    assert hub.step(other, "go", 1).json()["observation"] == "step 1"


def test_overrunning_session_is_dropped_with_504(hub):
    path = hub.open()
    assert hub.step(path, "slow", 1).status_code == 504
    assert hub.step(path, "slow", 1).status_code == 404


def test_full_environment_answers_429_until_a_session_ends(serve_hub):
    hub = serve_hub(capacity=2)
    first, _ = hub.open(), hub.open()
    body = {"env": "faulty", "item_id": "any-train-0"}
    refused = hub.client.post("/v1/sessions", json=body)
    assert refused.status_code == 429
    assert float(refused.headers["Retry-After"]) > 0
    hub.open("textcraft", "depth1-train-0")  # another environment has its own capacity
    hub.client.delete(first)
    assert hub.client.post("/v1/sessions", json=body).status_code == 201


def test_token_is_demanded_everywhere_but_healthz(serve_hub):
    hub = serve_hub(token="right")
    assert hub.client.get("/healthz").status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
        assert hub.client.get("/v1/envs", headers=headers).status_code == 401
        assert hub.client.post("/v1/sessions", json={}, headers=headers).status_code == 401
    right = {"Authorization": "Bearer right"}
    assert hub.client.get("/v1/envs", headers=right).status_code == 200


def test_oversized_body_is_refused(hub):
    path = hub.open()
    assert hub.step(path, "x" * MAX_BODY_BYTES, 1).status_code == 413
    assert hub.step(path, "x" * (MAX_BODY_BYTES - 1000), 1).status_code == 200


def test_oversized_body_of_unstated_length_is_refused(hub):
    path = hub.open()
    chunks = (b'{"seq": 1, "action": "' if i == 0 else b"x" * 8192 for i in range(20))
    headers = {"Content-Type": "application/json"}
    answer = hub.client.post(f"{path}/step", content=chunks, headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "body",
    [
        {"env": "faulty"},
        {"env": "faulty", "item_id": "any-train-0", "style": "loud"},
        {"env": "faulty", "item_id": "any-train-0", "seed": -1},
        {"env": "faulty", "item_id": "any-train-0", "surprise": 1},
    ],
)
def test_bad_body_is_unprocessable(hub, body):
    assert hub.client.post("/v1/sessions", json=body).status_code == 422


def test_bad_step_body_is_unprocessable_and_keeps_the_session(hub):
    path = hub.open()
    headers = {"Content-Type": "application/json"}
    broken = hub.client.post(f"{path}/step", content=b"{", headers=headers)
    assert broken.status_code == 422
    assert hub.step(path, "go", 0).status_code == 422
    assert hub.step(path, "go", 1).status_code == 200


def test_unknown_names_are_answered_with_the_nearest(hub):
    def detail(env: str, item_id: str) -> str:
        answer: httpx.Response = hub.client.post(
            "/v1/sessions", json={"env": env, "item_id": item_id}
        )
        assert answer.status_code == 404
        return answer.json()["detail"]

    assert "'babyai'" in detail("babyia", "GoToLocal-train-0")
    assert "'PickupLoc'" in detail("babyai", "PickUpLoc-train-0")
    assert "'depth1-test-" in detail("textcraft", "depth1-test-999999")


def test_session_ids_cannot_be_guessed(hub):
    ids = {hub.open().rpartition("/")[2] for _ in range(20)}
    assert len(ids) == 20
    assert all(len(session_id) >= 24 for session_id in ids)
