"""Laws of `actor.engine_args` and `actor.enforce_eager` before anything starts."""

from pathlib import Path

import pytest

from common.config.actor import OWN_ENGINE_ARGS, ActorSection, EnforceEager
from common.config.keys import list_keys
from common.config.load import config_as_yaml, load_config
from common.errors import ConfigError
from tools.checks.preflight import check_sleep

GIVEN = {
    "kv_cache_dtype": "fp8",
    "max_num_batched_tokens": 16384,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}


def test_engine_arguments_are_equal_from_overrides_and_yaml(tmp_path: Path) -> None:
    overrides = [
        "actor.engine_args.kv_cache_dtype=fp8",
        "actor.engine_args.max_num_batched_tokens=16384",
        "actor.engine_args.speculative_config.method=ngram",
        "actor.engine_args.speculative_config.num_speculative_tokens=3",
    ]
    cfg = load_config("quickstart", overrides)
    assert cfg.actor.engine_args == GIVEN
    (tmp_path / "own.yaml").write_text(config_as_yaml(cfg), encoding="utf-8")
    again = load_config(str(tmp_path / "own.yaml"), [])
    assert again.actor.engine_args == GIVEN


@pytest.mark.parametrize("name", sorted(OWN_ENGINE_ARGS))
def test_argument_set_by_the_project_names_its_key(name: str) -> None:
    key = OWN_ENGINE_ARGS[name]
    ((refused, value, law),) = ActorSection(engine_args={name: 1}).contradictions()
    assert (refused, value) == (f"engine_args.{name}", 1)
    assert law.endswith(f"use {key} instead" if key else "fixes this argument of vLLM; remove it")
    assert key in ("", *list_keys())


def test_argument_set_by_the_project_is_refused_at_loading() -> None:
    with pytest.raises(ConfigError, match=r"^actor\.engine_args\.seed=1: .*use run\.seed instead$"):
        load_config("quickstart", ["actor.engine_args.seed=1"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("true", EnforceEager.TRUE),
        ("false", EnforceEager.FALSE),
        ("True", EnforceEager.TRUE),
        ("auto", EnforceEager.AUTO),
        ("'false'", EnforceEager.FALSE),
    ],
)
def test_eager_execution_takes_booleans_and_words(word: str, meant: EnforceEager) -> None:
    cfg = load_config("quickstart", [f"actor.enforce_eager={word}"])
    assert cfg.actor.enforce_eager is meant


def test_eager_execution_is_automatic_by_default() -> None:
    cfg = load_config("quickstart", [])
    assert cfg.actor.enforce_eager is EnforceEager.AUTO
    with pytest.raises(ConfigError, match="expects one of auto, true, false"):
        load_config("quickstart", ["actor.enforce_eager=yes please"])


COLOCATED = ["train.mode=sync", "actor.placement=colocated"]


@pytest.mark.parametrize(
    ("overrides", "law"),
    [
        (["actor.placement=colocated"], "actor.sleep=1: needs train.mode=sync"),
        (["train.mode=sync"], "actor.sleep=1: needs actor.placement=colocated"),
        ([*COLOCATED, "learner.hold_back_steps=2"], "needs learner.hold_back_steps=0"),
        ([*COLOCATED, "learner.publish=delta"], "learner.publish='delta': needs actor.sleep=0"),
    ],
)
def test_sleep_is_refused_where_steps_overlap_sampling(overrides: list[str], law: str) -> None:
    with pytest.raises(ConfigError, match=law):
        load_config("quickstart", ["actor.sleep=1", *overrides])


def test_deep_sleep_is_refused_with_adapters() -> None:
    adapters = [*COLOCATED, "learner.lora.rank=8", "learner.optimizer=adamw"]
    assert load_config("quickstart", ["actor.sleep=1", *adapters]).actor.sleep == 1
    with pytest.raises(ConfigError, match=r"actor\.sleep=2: drops the base weights"):
        load_config("quickstart", ["actor.sleep=2", *adapters])


def test_sleep_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"actor\.sleep=2: nvidia-smi lists no GPU"):
        check_sleep(ActorSection(sleep=2))
