"""A node of older code and the configuration of a run of newer code."""

import pytest

from common.config.load import load_received
from common.config.run_config import RunConfig
from common.errors import ConfigError
from scheduler.members.older_code import default_keys, without_unknown
from tests.configs import edited

NEWER = """
run: {name: a, is_new: true, seed: 3}
novel: {depth: {most: 4}}
learner:
  lora: {rank: 0, flavour: plain}
"""
DEFAULTS = {"run.is_new", "novel.depth.most", "learner.lora.flavour", "run.resume"}


def test_changed_keys_are_no_default_keys() -> None:
    cfg = edited(RunConfig(), {"run.seed": 3, "actor.max_concurrent": 9, "learner.lora.rank": 4})
    found = default_keys(cfg, ("run", "actor", "learner", "tasks"))
    assert {"run.name", "actor.engine_args", "learner.lora.alpha", "tasks"} <= set(found)
    assert not {"run.seed", "actor.max_concurrent", "learner.lora.rank"} & set(found)
    assert len(set(found)) == len(found)


def test_unknown_key_with_its_default_is_ignored() -> None:
    text = without_unknown(NEWER, DEFAULTS)
    cfg = load_received(text, ["model.path=x"])
    assert (cfg.run.name, cfg.run.seed, cfg.learner.lora.rank) == ("a", 3, 0)


@pytest.mark.parametrize("key", ["run.is_new", "novel.depth.most", "learner.lora.flavour"])
def test_unknown_key_with_another_value_is_reported(key: str) -> None:
    text = without_unknown(NEWER, DEFAULTS - {key})
    with pytest.raises(ConfigError, match="no such key"):
        load_received(text, ["model.path=x"])


def test_unknown_key_of_a_run_without_defaults_is_reported() -> None:
    with pytest.raises(ConfigError, match="no such key"):
        load_received(without_unknown(NEWER, ()), ["model.path=x"])
