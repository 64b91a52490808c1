"""Laws of the keys that limit an environment's sessions."""

import pytest

from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions


@pytest.mark.parametrize(
    ("env", "capacity", "key"),
    [
        ("code", 4096, "envs.code.max_sessions"),
        ("code", 3, "envhub.capacity"),
        ("wordle", 4096, "envhub.capacity"),
        ("sqlgym", 4096, ""),
    ],
)
def test_limit_on_sessions_is_named_by_its_key(env: str, capacity: int, key: str) -> None:
    registry = Registry([env])
    sessions = Sessions(registry, idle_s=60.0, capacity=capacity, step_timeout_s=10.0)
    assert sessions.placement.limiting_key(registry.spec(env)) == key
