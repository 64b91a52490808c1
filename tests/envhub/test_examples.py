"""The environments that the documentation shows work."""

from typing import cast

import pytest

from common.repository import ROOT
from envhub.catalogue.registry import Registry
from envhub.env import Env, StepResult

GUESS = f"{ROOT / 'docs' / 'examples' / 'guess.py'}:make_spec"


@pytest.fixture(scope="module")
def hub(serve_hubs):
    return serve_hubs(GUESS)


def test_every_item_of_the_example_is_solved_by_its_expert():
    spec = Registry([GUESS]).spec("guess")
    items = [f"hundred-train-{i}" for i in range(80)] + [f"hundred-test-{i}" for i in range(20)]
    numbers = set()
    for item_id in items:
        env = cast(Env, spec.make(next(iter(spec.instruction))))
        env.reset(item_id, 0)
        numbers.add(env.fingerprint())
        results: list[StepResult] = []
        while not results or not results[-1].done:
            results.append(env.step(env.expert_action() or ""))
        assert results[-1].reward == 1.0
        assert len(results) <= spec.subsets["hundred"].max_turns
    assert len(numbers) == 100


def test_example_outside_the_package_is_played_over_http(hub):
    assert "guess" in hub.client.get("/v1/envs").json()
    path = hub.open("guess", "hundred-test-3")
    assert not hub.step(path, "__import__('os')", 1).json()["is_valid"]
    seq, done = 1, False
    while not done:
        seq += 1
        action = hub.client.get(f"{path}/hint").json()["expert_action"]
        done = hub.step(path, action, seq).json()["done"]
    assert seq <= 8 + 1
