"""Laws of the checks before an offline training starts."""

from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.offline.checks import check_dpo, check_evolve, check_sft
from tests.common.checks.models import write_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_rest=1, vocab_size=64, num_hidden_layers=1)


def configure(model: Path, repository: Path, *overrides: str) -> RunConfig:
    where = [f"model.path={model}", f"run.dir={model.parent / 'runs'}"]
    return load_config("smoke", [*where, *overrides], root=repository)


def test_new_policy_beyond_the_memory_is_refused(model: Path, repository: Path) -> None:
    sizes = ("sft.from_scratch=true", "sft.hidden_size=65536", "sft.num_layers=1000", "sft.output=")
    with pytest.raises(ConfigError, match=r"^sft\.hidden_size=65536: with sft\.num_layers=1000"):
        check_sft(configure(model, repository, *sizes), repository)


def test_missing_compiler_is_named_for_offline_training(
    model: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    for check in (check_sft, check_dpo):
        check(configure(model, repository), repository)
        with pytest.raises(ConfigError, match=r"^learner\.compile=true needs a compiler: .*g\+\+"):
            check(configure(model, repository, "learner.compile=true"), repository)


def test_offline_training_refuses_offload(model: Path, repository: Path) -> None:
    offload = ("learner.device=auto", "learner.optimizer=adamw", "learner.offload=optimizer")
    cfg = configure(model, repository, *offload)
    for check in (check_sft, check_dpo, check_evolve):
        with pytest.raises(ConfigError, match="sft, dpo and evolve do not support it"):
            check(cfg, repository)


def test_shipped_policy_is_overwritten_only_on_request(repository: Path) -> None:
    def configure_sft(*overrides: str) -> RunConfig:
        return load_config("tiny", [*overrides], root=repository)

    check_sft(configure_sft(), repository)
    for output in ("configs/policies/tiny", str(repository / "configs" / "policies" / "mine")):
        with pytest.raises(ConfigError, match=r"sft\.overwrite=true"):
            check_sft(configure_sft(f"sft.output={output}"), repository)
        check_sft(configure_sft(f"sft.output={output}", "sft.overwrite=true"), repository)
