"""Laws of a hub's signs of life."""

import time

import numpy as np
import pytest

from actor.rollout.env_client import LifeSigns

SIGN_S = 0.5


@pytest.mark.parametrize(
    ("silent_s", "on_for_s", "within_s", "are_missing"),
    [
        (0.0, 0.0, 4.0, False),
        (3.5, 0.0, 4.0, True),  # The hub is suspended.
        (5.0, 0.02, 4.0, True),  # It resumed just before the timeout.
        (5.0, 0.9, 4.0, True),
        (5.0, 1.1, 4.0, False),  # it had a second for the step
        (5.0, 4.5, 4.0, False),  # it stood still before the step began
        (31.0, 20.0, 60.0, True),
        (5.0, 20.0, 60.0, False),  # a step that takes so long has itself to blame
        (2.0, 0.0, 1.0, True),
    ],
)
def test_hub_stall_excuses_a_timed_out_step(
    monkeypatch: pytest.MonkeyPatch,
    silent_s: float,
    on_for_s: float,
    within_s: float,
    are_missing: bool,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signs = LifeSigns()
    assert not signs.are_missing(within_s=within_s), "some hubs give none"
    stopped_s = 100.0
    ends_s = stopped_s + silent_s + on_for_s
    for begins_s, until_s in ((0.0, stopped_s + 0.1), (stopped_s + silent_s, ends_s)):
        for now[0] in np.arange(begins_s, until_s, SIGN_S).tolist():
            signs.hear()
    now[0] = ends_s
    assert signs.are_missing(within_s=within_s) is are_missing
