"""Laws of the keys that may change while a run works."""

import pytest

from common.config.horizon import HorizonOverride
from common.config.keys import declared
from common.config.live import (
    LIVE_KEYS,
    check_effect,
    check_live,
    followed,
    is_live,
    live_values,
    text_at,
    with_values,
)
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.wire.messages import LiveConfig
from tests.configs import edited
from tools.cli.help import LIVE, help_text

CFG = edited(
    RunConfig(),
    {
        "model.path": "x",
        "horizon.stages": [5, 10],
        "horizon.per_env": {"maze": HorizonOverride(stages=[3, 6])},
    },
)


def test_every_live_key_is_declared_and_has_help() -> None:
    for key in LIVE_KEYS:
        own = key.replace("NAME", "maze")
        declared(own, shown=own)
        assert is_live(own)
        assert LIVE in help_text([own])
    assert LIVE not in help_text(["run.seed"])


@pytest.mark.parametrize(
    "key", ["run.seed", "actor.temperature", "horizon.kind", "learner.lora.rank", "tasks[0].weight"]
)
def test_other_keys_are_refused_with_the_live_ones(key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_live(key)
    assert str(raised.value).startswith(f"{key}: this key cannot change during a run")
    assert all(live in str(raised.value) for live in LIVE_KEYS)


def test_unknown_key_is_reported_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"learner\.lrr.*nearest is learner\.lr"):
        check_live("learner.lrr")


def test_live_values_can_be_read_back() -> None:
    values = live_values(CFG)
    assert values["horizon.stages"] == "[5, 10]"
    assert values["horizon.per_env.maze.stages"] == "[3, 6]"
    assert values["learner.lr"] == "1e-06"
    assert with_values(CFG, values) == CFG


def test_changed_values_are_checked_like_a_new_run() -> None:
    cfg = with_values(CFG, {"horizon.stages": "[4, 8]", "learner.lr": "2e-5"})
    assert (cfg.horizon.stages, cfg.learner.lr) == ([4, 8], 2e-5)
    assert edited(cfg, {"horizon.stages": [5, 10], "learner.lr": CFG.learner.lr}) == CFG
    for key, value in {
        "horizon.stages": "[8, 4]",
        "learner.lr": "0",
        "actor.min_concurrent": "999",
        "learner.max_lag_steps": "[1]",
    }.items():
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            with_values(CFG, {key: value})


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("horizon.every_steps", "horizon.kind=stepwise"),
        ("horizon.per_env.maze.over_steps", "horizon.kind=linear"),
        ("learner.muon_lr", "learner.optimizer=muon"),
    ],
)
def test_key_without_an_effect_is_refused(key: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"no effect in this run, since it needs {setting}"):
        check_effect(CFG, key)
    name, value = setting.split("=")
    check_effect(with_values(CFG, {name: value}), key)
    check_effect(CFG, "eval.every_steps")


def test_stages_that_no_task_takes_are_refused() -> None:
    tasks = [TaskSection(env="maze", subset="a"), TaskSection(env="shop", subset="b")]
    cfg = edited(CFG, {"tasks": tasks})
    check_effect(cfg, "horizon.stages")  # The shop takes them.
    check_effect(cfg, "horizon.per_env.maze.stages")
    of_shop = {"maze": HorizonOverride(stages=[3]), "shop/b": HorizonOverride(stages=[4])}
    all_own = edited(cfg, {"horizon.per_env": of_shop})
    with pytest.raises(ConfigError, match=r"all tasks have stages of their own.*maze, shop/b"):
        check_effect(all_own, "horizon.stages")
    check_effect(all_own, "horizon.per_env.shop/b.stages")
    covered = of_shop | {"shop": HorizonOverride(stages=[5])}
    with pytest.raises(ConfigError, match="all tasks have stages of their own"):
        check_effect(edited(cfg, {"horizon.per_env": covered}), "horizon.per_env.shop.stages")


def test_entry_of_a_map_is_changed_and_not_added() -> None:
    assert text_at(CFG, "horizon.per_env.shop.stages") == ""
    with pytest.raises(ConfigError, match=r"per_env\.shop: the configuration has no such entry"):
        with_values(CFG, {"horizon.per_env.shop.stages": "[3]"})
    cfg = with_values(CFG, {"horizon.per_env.maze.every_steps": "7"})
    assert cfg.horizon.per_env["maze"] == HorizonOverride(stages=[3, 6], every_steps=7)


def test_role_follows_only_its_own_sections() -> None:
    live = LiveConfig(number=2, values={"learner.lr": "2e-5", "actor.max_concurrent": "8"})
    assert followed(CFG, live, ("learner",)) == edited(CFG, {"learner.lr": 2e-5})
    assert followed(CFG, live, ("actor",)) == edited(CFG, {"actor.max_concurrent": 8})
    assert followed(CFG, live, ("eval",)) is CFG
    assert followed(CFG, None, ("learner",)) is CFG
