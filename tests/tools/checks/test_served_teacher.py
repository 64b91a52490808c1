"""Laws of the checks of a teacher before a run starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.load import load_config
from common.config.run_config import Launcher, RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from tools.checks.served_engines import check_teacher

BASE = load_config("teacher", [])


def config_of(**changes: Any) -> RunConfig:
    """Return the preset with other keys of `algorithm.teacher`."""
    teacher = replace(BASE.algorithm.teacher, **changes)
    return replace(BASE, algorithm=replace(BASE.algorithm, teacher=teacher))


def test_teacher_of_the_same_vocabulary_is_accepted() -> None:
    check_teacher(config_of())


def test_other_vocabulary_is_refused_with_both_sizes(tmp_path: Path) -> None:
    other = tmp_path / "teacher"
    shutil.copytree(ROOT / "configs" / "policies" / "tiny-expert", other)
    tree = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    own = len(tree["model"]["vocab"] | {each["content"]: 0 for each in tree["added_tokens"]})
    tree["model"]["vocab"]["a new token"] = 7_000
    (other / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    reason = rf"has {own + 1} tokens, that of model\.path=configs/policies/tiny has {own}\."
    with pytest.raises(ConfigError, match=reason):
        check_teacher(config_of(path=str(other)))


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (
            replace(BASE, actor=replace(BASE.actor, temperature=0.7)),
            r"actor\.temperature=0\.7: must be 1",
        ),
        (replace(BASE, launcher=Launcher.RAY), "needs launcher=local"),
        (
            replace(BASE, actor=replace(BASE.actor, max_model_len=2048)),
            "supports 2048 positions .* needs 2049",
        ),
    ],
)
def test_impossible_teacher_is_refused(cfg: RunConfig, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_teacher(cfg)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"url": "http://h/v1"}, "one teacher only"),
        ({"path": "", "url": "http://h/v1"}, r"algorithm\.teacher\.model=.*must name the model"),
        ({"serve": ["x"]}, "must be KEY=VALUE"),
    ],
)
def test_contradicting_keys_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(**changes)
