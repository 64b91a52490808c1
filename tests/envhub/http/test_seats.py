"""Laws of seats in the hub's answers, through real HTTP."""

import pytest

from envhub.env import EnvSpec, Reward, Style, SubsetSpec
from envhub.envs.nim import NimEnv
from envhub.summed_rewards import with_summed_rewards

SIZES = {"OnePile": SubsetSpec(num_train=1, num_test=1, max_turns=1)}
SEAT_FIELDS = {"seat", "num_seats", "seat_rewards", "seats"}


@pytest.fixture(scope="module")
def hub(serve_hubs):
    return serve_hubs()


def test_new_session_names_its_seats(hub):
    body = {"env": "nim", "item_id": "OnePile-train-0"}
    created = hub.client.post("/v1/sessions", json=body).json()
    assert (created["seat"], created["num_seats"]) == (0, 2)
    (entry,) = hub.client.post("/v1/sessions/batch", json=[body]).json()
    assert (entry["status"], entry["seat"], entry["num_seats"]) == (201, 0, 2)
    assert hub.client.get("/v1/envs").json()["nim"]["seats"] == 2


def test_step_names_the_next_seat_and_all_rewards(hub):
    path = hub.open("nim", "OnePile-train-0")
    answer = hub.step(path, "take 1", 1).json()
    assert (answer["seat"], answer["seat_rewards"], answer["done"]) == (1, [0.0, 0.0], False)
    answer = hub.step(path, "cheat", 2).json()
    assert (answer["seat"], answer["seat_rewards"], answer["done"]) == (None, [1.0, 0.0], True)


def test_oversized_action_leaves_the_turn_to_its_seat(hub):
    path = hub.open("nim", "OnePile-train-0")
    for seq, seat in ((1, 0), (3, 1)):
        body = {"action": "", "num_bytes": 1 << 40, "seq": seq}
        answer = hub.client.post(f"{path}/step", json=body).json()
        assert (answer["seat"], answer["is_valid"], answer["done"]) == (seat, False, False)
        assert answer["seat_rewards"] == [0.0, 0.0]
        hub.step(path, "take 1", seq + 1)


def test_environment_without_seats_answers_as_before(hub):
    body = {"env": "faulty", "item_id": "any-train-0"}
    created = hub.client.post("/v1/sessions", json=body).json()
    assert set(created) == {"session_id", "observation", "state", "start_score", "is_repeatable"}
    path = f"/v1/sessions/{created['session_id']}"
    assert not SEAT_FIELDS & set(hub.step(path, "go", 1).json())
    assert not SEAT_FIELDS & set(hub.client.get("/v1/envs").json()["faulty"])


def test_seats_refuse_summed_rewards():
    spec = EnvSpec(
        name="n",
        subsets=SIZES,
        instruction={Style.COMPACT: ""},
        make=NimEnv,
        seats=2,
        reward=Reward.SUM,
    )
    with pytest.raises(ValueError, match="needs Reward"):
        with_summed_rewards(spec)
