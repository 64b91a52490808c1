"""Laws of the hub's routes and sessions, through real HTTP."""

import socket
import time

import httpx
import pytest

from common.formats.action_size import DEFAULT_ACTION_MIB, FIELDS_BYTES, MIB
from envhub.hosting.sessions import GONE_S
from envhub.http.bodies import MAX_BATCH


@pytest.fixture
def hub(serve_hub):
    return serve_hub()


@pytest.fixture(scope="module")
def served(serve_hubs):
    """One hub for the many cases that leave nothing behind."""
    return serve_hubs()


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
    assert set(answer) == {
        "observation",
        "reward",
        "done",
        "is_valid",
        "is_success",
        "state",
        "is_truncated",
    }
    assert (answer["reward"], answer["done"], answer["is_valid"]) == (1.0, True, True)
    assert hub.step(path, "turn left", 2).status_code == 409
    assert hub.client.delete(path).status_code == 204
    assert hub.client.delete(path).status_code == 404
    told = hub.client.get("/healthz").json()
    assert (told["num_created"], told["num_steps"], told["num_sessions"]) == (1, 1, 0)


def test_catalogue_gives_sizes_turns_and_instructions(hub):
    catalogue = hub.client.get("/v1/envs").json()
    pickup = {"num_train": 1_000_000, "num_test": 1_000, "max_turns": 6}
    assert catalogue["babyai"]["subsets"]["PickupLoc"] == pickup
    assert set(catalogue["textcraft"]["instruction"]) == {"compact", "instructed", "agentgym"}
    assert "Thought:" in catalogue["textcraft"]["instruction"]["agentgym"]


def test_answers_hold_no_half_characters(hub):
    path = hub.open()
    said = hub.step(path, "half", 1)
    assert said.json()["observation"] == "step 1 \ufffd"
    told = hub.step(path, "raise half", 2)
    assert told.status_code == 500
    assert "a bug with \ufffd" in told.json()["detail"]
    assert "envhub_repaired_total 1.0" in hub.client.get("/metrics").text


def test_fact_that_is_not_finite_fails_with_its_place(hub):
    answer = hub.step(hub.open(), "no limit", 1)
    assert answer.status_code == 500
    text = "faulty: ValueError: facts['speeds'][1]=inf is not a finite number, which JSON lacks"
    assert text in answer.json()["detail"]


@pytest.mark.parametrize(("action", "reward"), [("overpay", "2.0"), ("pay nothing", "nan")])
def test_reward_out_of_its_range_ends_the_session(hub, action, reward):
    path = hub.open()
    answer = hub.step(path, action, 1)
    assert answer.status_code == 500
    assert answer.json()["detail"] == f"faulty: reward {reward} is not in [0, 1]"
    assert hub.step(path, "go", 1).status_code == 404


def test_message_that_is_not_finite_opens_no_session(serve_hub):
    hub = serve_hub("make_odd_call")
    body = {"env": "odd_call", "item_id": "any-train-0"}
    answer = hub.client.post("/v1/sessions", json=body)
    assert answer.status_code == 500
    place = "first_messages[0]['tool_calls'][0]['function']['arguments']['s']=inf"
    assert f"odd_call: {place} is not a finite number" in answer.json()["detail"]
    assert hub.client.get("/healthz").json()["num_sessions"] == 0


def test_metric_that_is_not_finite_fails_with_its_name(hub):
    answer = hub.step(hub.open(), "no speed", 1)
    assert answer.status_code == 500
    assert "faulty: ValueError: metric speed=nan is not a finite number" in answer.json()["detail"]


def test_repeated_seq_is_answered_from_memory(hub):
    path = hub.open()
    first = hub.step(path, "go", 1).json()
    assert hub.step(path, "go", 1).json() == first
    assert hub.step(path, "another text", 1).json() == first
    assert hub.step(path, "go", 2).json()["observation"] == "step 2"
    assert hub.client.get(f"{path}/render").json() == {"text": "2 steps", "fingerprint": "same"}


def test_last_step_of_episode_can_repeat(hub):
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


def test_session_expires_after_its_idle_limit(hub):
    used, unused = hub.open(), hub.open()
    hub.clock.now_s += 40.0
    assert hub.step(used, "go", 1).status_code == 200
    hub.clock.now_s += 40.0  # 80 s after opening, 40 s after the step; the idle limit is 60 s
    assert hub.step(unused, "go", 1).status_code == 404
    assert hub.step(used, "go", 2).status_code == 200
    assert hub.run(hub.sessions.expire()) == 1
    assert len(hub.sessions) == 1


def test_failing_session_is_dropped_alone(hub):
    failing, other = hub.open(), hub.open()
    failed = hub.step(failing, "raise", 1)
    assert failed.status_code == 500
    assert "a bug in the environment" in failed.json()["detail"]
    assert hub.step(failing, "go", 1).status_code == 404
    assert hub.step(other, "go", 1).json()["observation"] == "step 1"


def test_overrunning_session_is_dropped_with_504(hub):
    path = hub.open()
    hub.session(path).episode._timeout_s = 0.1
    assert hub.step(path, "slow", 1).status_code == 504
    assert hub.step(path, "slow", 1).status_code == 404


def test_full_environment_returns_429_until_a_session_ends(serve_hub):
    hub = serve_hub(capacity=2)
    first, _ = hub.open(), hub.open()
    body = {"env": "faulty", "item_id": "any-train-0"}
    refused = hub.client.post("/v1/sessions", json=body)
    assert refused.status_code == 429
    assert refused.json()["detail"].endswith("at most 2 (envhub.capacity)")
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


def test_token_is_accepted_in_the_url(serve_hub):
    hub = serve_hub(token="right")
    assert hub.client.get("/v1/envs", auth=("anybody", "right")).status_code == 200
    assert hub.client.get("/v1/envs", auth=("right", "wrong")).status_code == 401
    for header in ("Basic", "Basic !!", "Basic cmlnaHQ=", "basic", "Digest right"):
        headers = {"Authorization": header}
        assert hub.client.get("/v1/envs", headers=headers).status_code == 401


def test_oversized_body_is_refused(hub):
    path = hub.open()
    most = DEFAULT_ACTION_MIB * MIB
    assert hub.step(path, "x" * (most + FIELDS_BYTES), 1).status_code == 413
    assert hub.step(path, "x" * most, 1).status_code == 200
    long = {"env": "x" * FIELDS_BYTES, "item_id": ""}
    assert hub.client.post("/v1/sessions", json=long).status_code == 413


def test_oversized_body_of_unstated_length_is_refused(hub):
    path = hub.open()
    part = b"x" * MIB
    chunks = (b'{"seq": 1, "action": "' if i == 0 else part for i in range(DEFAULT_ACTION_MIB + 3))
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


def test_bad_step_body_returns_422_and_keeps_the_session(hub):
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


def test_environment_failure_ends_session_with_text(hub):
    path = hub.open()
    failed = hub.step(path, "fail", 1)
    assert failed.status_code == 500
    assert failed.json()["detail"] == "faulty: EnvFailure: the machine behind it is down"


def test_batch_open_isolates_each_failure(hub):
    entries = [
        {"env": "faulty", "item_id": "any-train-0"},
        {"env": "faulty", "item_id": "any-train-99"},
        {"env": "faulty", "item_id": "any-train-1", "style": "loud"},
        "no object",
        {"env": "textcraft", "item_id": "depth1-train-0"},
    ]
    answer = hub.client.post("/v1/sessions/batch", json=entries)
    assert answer.status_code == 200
    assert [each["status"] for each in answer.json()] == [201, 404, 422, 422, 201]
    assert "'any-train-9'" in answer.json()[1]["detail"]
    assert len(hub.sessions) == 2


def test_batch_step_isolates_each_failure(hub):
    ids = [hub.open().rpartition("/")[2] for _ in range(4)]
    actions = ["go", "raise", "end", "go"]
    entries = [{"session_id": i, "action": a, "seq": 1} for i, a in zip(ids, actions, strict=True)]
    entries[3]["seq"] = 5
    entries.append({"session_id": "none", "action": "go", "seq": 1})
    answers = hub.client.post("/v1/step/batch", json=entries).json()
    assert [each["status"] for each in answers] == [200, 500, 200, 409, 404]
    assert answers[0] == {
        "status": 200,
        "observation": "step 1",
        "reward": 0.0,
        "done": False,
        "is_valid": True,
        "is_success": False,
        "state": "",
        "is_truncated": False,
    }
    assert (answers[2]["reward"], answers[2]["done"]) == (1.0, True)
    assert "a bug in the environment" in answers[1]["detail"]


@pytest.mark.parametrize("env", ["faulty", "fragile"])  # In the hub's process and in a worker.
def test_every_route_marks_a_truncated_end(serve_hub, env):
    hub = serve_hub("make_worker")
    for action, is_truncated in (("cut off", True), ("end", False)):
        alone = hub.step(hub.open(env), action, 1).json()
        entry = {"session_id": hub.open(env).rpartition("/")[2], "action": action, "seq": 1}
        (together,) = hub.client.post("/v1/step/batch", json=[entry]).json()
        for answer in (alone, together):
            assert (answer["done"], answer["is_truncated"]) == (True, is_truncated)
            assert answer["is_success"] is not is_truncated


def test_batch_runs_steps_of_one_session_in_order(hub):
    session_id = hub.open().rpartition("/")[2]
    entries = [{"session_id": session_id, "action": "go", "seq": i} for i in (1, 2, 2, 3)]
    answers = hub.client.post("/v1/step/batch", json=entries).json()
    assert [each["observation"] for each in answers] == ["step 1", "step 2", "step 2", "step 3"]


def test_batch_close_isolates_missing_sessions(hub):
    ids = [hub.open().rpartition("/")[2] for _ in range(3)]
    entries = [{"session_id": each} for each in (ids[0], "none", ids[2])]
    answers = hub.client.post("/v1/close/batch", json=[*entries, {"session": ids[1]}]).json()
    assert [each["status"] for each in answers] == [204, 404, 204, 422]
    assert len(hub.sessions) == 1


def test_batch_beyond_the_bound_is_refused(hub):
    entries = [{"env": "faulty", "item_id": "any-train-0"}] * (MAX_BATCH + 1)
    assert hub.client.post("/v1/sessions/batch", json=entries).status_code == 422
    assert len(hub.sessions) == 0


def test_batch_refuses_entries_beyond_capacity_singly(serve_hub):
    hub = serve_hub(capacity=2)
    entries = [{"env": "faulty", "item_id": "any-train-0"}] * 3
    answers = hub.client.post("/v1/sessions/batch", json=entries).json()
    assert [each["status"] for each in answers] == [201, 201, 429]


def test_draining_hub_refuses_new_sessions_and_serves_old(hub):
    path = hub.open()
    hub.run(hub.sessions.drain(1.0))
    refused = hub.client.post("/v1/sessions", json={"env": "faulty", "item_id": "any-train-0"})
    assert refused.status_code == 503
    assert float(refused.headers["Retry-After"]) > 0
    assert hub.client.get("/healthz").json()["status"] == "draining"
    assert hub.client.get("/readyz").status_code == 503
    assert hub.step(path, "go", 1).status_code == 200


def test_task_lists_are_served(hub):
    assert hub.client.get("/v1/envs").json()["faulty"]["tasks"] == {
        "Any": {"scenario": "Tests", "subset": "any", "num_train": 1, "num_test": 1}
    }
    lists = {"Any": {"train": ["any-train-1"], "test": ["any-test-2"]}}
    assert hub.client.get("/v1/envs/faulty/tasks").json() == lists
    assert hub.client.get("/v1/envs/fautly/tasks").status_code == 404


def test_metrics_count_sessions_and_steps(hub):
    path, _ = hub.open(), hub.open()
    hub.step(path, "go", 1)
    hub.client.delete(path)
    text = hub.client.get("/metrics").text
    assert 'envhub_sessions_live{env="faulty"} 1.0\n' in text
    assert "envhub_created_total 2.0\n" in text
    assert 'envhub_step_seconds_count{env="faulty"} 1.0\n' in text
    assert 'envhub_resident_bytes{process="hub"}' in text


def test_openapi_describes_bodies_answers_and_failures(hub):
    routes = hub.client.get("/openapi.json").json()["paths"]
    step = routes["/v1/sessions/{session_id}/step"]["post"]
    body = step["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == {"action", "seq", "num_bytes", "save"}
    assert {"200", "401", "404", "409", "413", "422", "500", "504"} <= set(step["responses"])


MALFORMED = [
    b"",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"action": "\xed\xa0\x80", "seq": 1}',
    b'{"action": "go", "seq": NaN}',
    b'{"action": "go", "seq": 1e999}',
    b'{"action": "go", "seq": ' + b"9" * 5000 + b"}",
    b'{"action": "go", "seq": true, "\\ud800": 1}',
    b'{"action": null, "seq": 1}',
    b"[" * 20_000,
]


@pytest.mark.parametrize("route", ["step", "create", "batch", "steps", "close"])
@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_body_is_refused_and_harms_nothing(served, route, number):
    path = served.open()
    where = {
        "step": f"{path}/step",
        "create": "/v1/sessions",
        "batch": "/v1/sessions/batch",
        "steps": "/v1/step/batch",
        "close": "/v1/close/batch",
    }[route]
    is_empty_list = route in ("batch", "steps", "close") and MALFORMED[number] == b"[]"
    answer = served.client.post(where, content=MALFORMED[number])
    assert answer.status_code == (200 if is_empty_list else 422)
    assert served.step(path, "go", 1).json()["observation"] == "step 1"
    served.client.delete(path)


@pytest.mark.parametrize("action", ["a\x00b", "\U0001f600" * 100, "", " " * 5000, "%s%n${x}"])
def test_any_text_is_an_action(served, action):
    path = served.open("textcraft", "depth1-train-0")
    answer = served.step(path, action, 1)
    assert answer.status_code == 200
    assert not answer.json()["is_valid"]


@pytest.mark.parametrize("session_id", ["%00", "%ff%fe", "a" * 5000, "..%2f..", "%ED%A0%80"])
def test_odd_session_id_is_unknown(served, session_id):
    for path in ("hint", "render"):
        assert served.client.get(f"/v1/sessions/{session_id}/{path}").status_code == 404
    assert served.client.delete(f"/v1/sessions/{session_id}").status_code in (404, 405)


def test_client_disconnect_within_a_body_logs_no_traceback(hub, caplog):
    address = hub.client.base_url
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: hub\r\nContent-Length: 500\r\n\r\n{"
    with socket.create_connection((address.host, address.port), timeout=60) as client:
        client.sendall(head)
    assert hub.client.get("/healthz").status_code == 200
    assert "Traceback" not in caplog.text
    assert "ClientDisconnect" not in caplog.text


@pytest.mark.slow
def test_sessions_end_with_their_owners_last_connection(hub):
    """What a killed actor had open: the kernel closes its connections, and nothing else."""
    mine = {"env": "faulty", "item_id": "any-train-0", "owner": "a1"}
    assert hub.client.post("/v1/sessions", json=mine).status_code == 201
    path = hub.open()
    with hub.client.stream("GET", "/v1/presence/a1") as first:
        signs = first.iter_bytes()
        next(signs)
        with hub.client.stream("GET", "/v1/presence/a1") as second:
            next(second.iter_bytes())
        time.sleep(GONE_S + 0.5)
        assert len(hub.sessions) == 2, "one connection is left"
    deadline = time.monotonic() + 60.0
    while len(hub.sessions) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert hub.step(path, "ok", 1).status_code != 404, "it has no owner"
    assert hub.sessions.counts["abandoned"] == 1
