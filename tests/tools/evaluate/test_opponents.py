"""Laws of the engines of opponents in an evaluation."""

import os
from pathlib import Path

from common.config.load import load_config
from common.store.run_dir import RunDir
from tools.evaluate.config import EvalConfig
from tools.evaluate.evaluate import serve_opponents


def test_evaluation_beside_random_play_starts_nothing(tmp_path: Path) -> None:
    before = dict(os.environ)
    with serve_opponents(load_config("smoke", [], schema=EvalConfig), RunDir(root=tmp_path)):
        assert dict(os.environ) == before
    assert [*tmp_path.iterdir()] == []
