"""Laws of the checks before an offline training starts."""

from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_config
from common.config.run_config import Config
from common.errors import ConfigError
from tests.tools.checks.models import write_model
from tools.offline.checks import check_dpo, check_evolve, check_sft
from tools.offline.config import DpoConfig, EvolveConfig, SftConfig


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_rest=1, vocab_size=64, num_hidden_layers=1)


def configure(
    model: Path,
    *overrides: str,
    schema: type[Config] = SftConfig,  # type: ignore[assignment]
) -> Config:
    runs = model.parent / "runs"
    runs.mkdir(exist_ok=True)
    where = [f"model.path={model}", f"run.dir={runs}"]
    is_dpo = schema is DpoConfig
    if is_dpo and not any(override.startswith("dpo.data=") for override in overrides):
        where.append(f"dpo.data={runs}")
    return load_config("smoke", [*where, *overrides], schema=schema)


CHECKS: list[tuple[Any, Any]] = [
    (check_sft, SftConfig),
    (check_dpo, DpoConfig),
    (check_evolve, EvolveConfig),
]


def test_new_policy_beyond_the_memory_is_refused(model: Path) -> None:
    sizes = ("sft.from_scratch=true", "sft.hidden_size=65536", "sft.num_layers=1000", "sft.output=")
    with pytest.raises(ConfigError, match=r"^sft\.hidden_size=65536: with sft\.num_layers=1000"):
        check_sft(configure(model, *sizes))


def test_missing_compiler_is_named_for_offline_training(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for check, schema in (CHECKS[0], CHECKS[1]):
        check(configure(model, schema=schema))
        compiled = configure(model, "learner.compile=true", schema=schema)
        with pytest.raises(ConfigError, match=r"^learner\.compile=true needs a compiler: .*g\+\+"):
            check(compiled)


def test_offline_training_refuses_offload(model: Path) -> None:
    offload = ("learner.device=auto", "learner.optimizer=adamw", "learner.offload=optimizer")
    for check, schema in CHECKS:
        cfg = configure(model, *offload, schema=schema)
        with pytest.raises(ConfigError, match="sft, dpo and evolve do not support it"):
            check(cfg)


def test_shipped_policy_is_overwritten_only_on_request(repository: Path) -> None:
    def configure_sft(*overrides: str) -> SftConfig:
        return load_config("tiny", [*overrides], schema=SftConfig)

    check_sft(configure_sft())
    for output in ("configs/policies/tiny", str(repository / "configs" / "policies" / "mine")):
        with pytest.raises(ConfigError, match=r"sft\.overwrite=true"):
            check_sft(configure_sft(f"sft.output={output}"))
        check_sft(configure_sft(f"sft.output={output}", "sft.overwrite=true"))


def test_missing_episodes_are_refused_before_the_model_loads(model: Path) -> None:
    for key, (check, schema) in zip(("sft.demonstrations", "dpo.data"), CHECKS, strict=False):
        cfg = configure(model, f"{key}=/no/file", schema=schema)
        with pytest.raises(ConfigError, match=rf"^{key}=/no/file: no such file or folder"):
            check(cfg)
    with pytest.raises(ConfigError, match=r"^dpo\.data is not set"):
        check_dpo(configure(model, "dpo.data=", schema=DpoConfig))


def test_first_record_is_read_before_the_model_loads(model: Path) -> None:
    file = model.parent / "pairs.jsonl"
    for key, (check, schema) in zip(("sft.demonstrations", "dpo.data"), CHECKS, strict=False):
        cfg = configure(model, f"{key}={file}", schema=schema)
        file.write_text('{"question": "Hi?", "chosen": "Hello."}\n', encoding="utf-8")
        with pytest.raises(ConfigError, match="record 1: no known format"):
            check(cfg)
        file.write_text('{"prompt": "Hi?", "completion": "Hello."}\n', encoding="utf-8")
        check(cfg)
    file.write_text('{"prompt": "Hi?", "chosen": "Hello.", "rejected": "Go."}\n', encoding="utf-8")
    check_dpo(configure(model, f"dpo.data={file}", schema=DpoConfig))
