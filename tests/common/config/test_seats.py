"""Laws of the options of seats."""

import pytest

from actor.policy import PolicyConfig
from common.config.actor import SeatsOptions
from common.config.load import load_config
from common.errors import ConfigError


def test_opponents_that_are_not_named_are_model_folders() -> None:
    seats = SeatsOptions(
        opponents=["self", "a/b", "checkpoints", "c"], eval_opponents=["random", "c", "d"]
    )
    assert seats.folders() == ["a/b", "c", "d"]
    assert seats.folders(in_training=False) == ["c", "d"]
    assert SeatsOptions().folders() == []


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("opponents=[]", "must name at least one of self"),
        ("opponents=[url]", "must name the endpoint of the opponent `url`"),
        ("url=http://h/v1", "must name the model at actor.seats.url"),
        ("eval_opponents=[checkpoints]", "cannot name checkpoints"),
        ("serve=[fast]", "must be KEY=VALUE"),
        ("trained=[-1]", "trained"),
    ],
)
def test_contradicting_option_is_refused_with_its_key(override: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config("smoke", [f"actor.seats.{override}"])
    assert "actor.seats." in str(refused.value)
    assert reason in str(refused.value)


def test_past_versions_are_served_by_roles_only() -> None:
    with pytest.raises(ConfigError, match="must be 0 without policy"):
        load_config("smoke", ["policy.past_every_s=5"], schema=PolicyConfig)
