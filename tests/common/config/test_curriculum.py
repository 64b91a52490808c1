"""Laws of the curriculum's configuration."""

from pathlib import Path

import pytest

from common.config.horizon import HorizonKind
from common.config.load import load_config
from common.config.mixture import MixtureKind
from common.errors import ConfigError
from common.store.run_start import save_config

BASE = [
    "model.path=/weights",
    "tasks=[{env: babyai, subset: GoTo}, {env: textcraft, subset: depth1}]",
    "horizon.kind=stepwise",
    "horizon.stages=[6, 13, 20]",
]


def test_horizon_override_inherits_unset_keys() -> None:
    overrides = [*BASE, "horizon.per_env.textcraft.stages=[10, 20, 30]"]
    cfg = load_config(None, overrides)
    policy = cfg.horizon.policy("textcraft")
    assert (policy.kind, policy.stages) == (HorizonKind.STEPWISE, (10, 20, 30))
    assert cfg.horizon.policy("babyai").stages == (6, 13, 20)


def test_subset_inherits_unset_keys_from_its_environment() -> None:
    overrides = [
        *BASE,
        "horizon.per_env.textcraft.stages=[10, 20, 30]",
        "horizon.per_env.textcraft/depth1.every_steps=7",
    ]
    cfg = load_config(None, overrides)
    assert cfg.horizon.name_of("textcraft", "depth1") == "textcraft/depth1"
    assert cfg.horizon.name_of("textcraft", "depth2") == "textcraft"
    policy = cfg.horizon.policy("textcraft/depth1")
    assert (policy.kind, policy.stages) == (HorizonKind.STEPWISE, (10, 20, 30))
    assert (policy.every_steps, cfg.horizon.policy("textcraft").every_steps) == (7, 100)


def test_horizon_override_may_have_another_kind(tmp_path: Path) -> None:
    overrides = [
        *BASE,
        "horizon.per_env.textcraft.kind=linear",
        "horizon.per_env.textcraft.over_steps=50",
        "mixture.kind=temperature",
        "mixture.temperature=2",
    ]
    cfg = load_config(None, overrides)
    policy = cfg.horizon.policy("textcraft")
    assert (policy.kind, policy.stages, policy.over_steps) == (HorizonKind.LINEAR, (6, 13, 20), 50)
    assert cfg.mixture.kind is MixtureKind.TEMPERATURE
    save_config(cfg, tmp_path / "config.yaml")
    again = load_config(str(tmp_path / "config.yaml"), [])
    assert again == cfg


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "horizon.stages=[13, 6]",
            "horizon.stages=[13, 6]: must be positive, strictly increasing turns",
        ),
        (
            "horizon.per_env.babyai.stages=[6, 6]",
            "horizon.per_env.babyai.stages=[6, 6]: must be positive, strictly increasing turns",
        ),
        (
            "horizon.per_env.babyai.kind=gate",
            "horizon.per_env.babyai.kind='gate': must be one of fixed",
        ),
        (
            "horizon.per_env.babyia.stages=[6]",
            "horizon.per_env.babyia='babyia': no task has this environment",
        ),
        ("horizon.per_env.babyai.stage=[6]", "no such key"),
        (
            "horizon.per_env.babyai/GoTu.stages=[6]",
            "horizon.per_env.babyai/GoTu='babyai/GoTu': no task has this subset",
        ),
        ("horizon.per_env=3", "horizon.per_env=3: expects a map from names to sections with"),
        ("horizon.kind=adaptive", "expects one of fixed, stepwise, linear, gated"),
        ("horizon.gated.min_steps=5", "horizon.gated.min_steps=5: must be >= horizon.gated.window"),
        ("horizon.gated.ess_frac=2", "horizon.gated.ess_frac=2.0: must be in [0, 1]"),
        ("mixture.temperature=2", "mixture.temperature=2.0: changes nothing with mixture.kind"),
        ("mixture.floor=0", "mixture.floor=0.0: must be in (0, 1]"),
        ("mixture.kind=even", "expects one of weights, temperature, adaptive"),
    ],
)
def test_invalid_curriculum_is_refused_by_its_key(override: str, words: str) -> None:
    overrides = [each for each in BASE if each.split("=")[0] != override.split("=")[0]]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*overrides, override])
    assert words in str(caught.value)


def test_gated_horizon_needs_two_stages() -> None:
    overrides = [*BASE[:2], "horizon.kind=gated", "horizon.stages=[6]"]
    with pytest.raises(ConfigError, match="needs two or more"):
        load_config(None, overrides)


def test_task_weights_of_sum_zero_are_refused() -> None:
    tasks = "tasks=[{env: babyai, subset: GoTo, weight: 0}]"
    with pytest.raises(ConfigError, match="the weights must not sum to zero"):
        load_config(None, ["model.path=/weights", tasks])


def test_horizon_allows_million_tokens_not_turns() -> None:
    tokens = ["model.path=m", "horizon.unit=tokens", "horizon.stages=[1000000]"]
    room = ["actor.max_model_len=1100000", "learner.max_tokens_per_microbatch=1100000"]
    cfg = load_config(None, [*tokens, *room])
    assert cfg.horizon.stages == [1_000_000]
    with pytest.raises(ConfigError, match=r"horizon\.stages=\[100001\].*must be in \[1, 100000\]"):
        load_config(None, ["model.path=m", "horizon.stages=[100001]"])
