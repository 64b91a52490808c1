"""Laws of the date that a command's prompts name."""

from pathlib import Path

import pytest

from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.formats.chat_template import prompt_date
from tools.cli.requested import begin


@pytest.mark.parametrize("is_kept", [True, False])
def test_command_and_its_prompts_have_one_date(is_kept: bool, tmp_path: Path) -> None:
    run = RunSection(name="r", dir=str(tmp_path))
    cfg = RunConfig(run=run, model=ModelSection(path="m", date="2024-02-29"))
    cfg, run_dir = begin(cfg, "eval", keeps_date=is_kept)
    assert [cfg.model.date, prompt_date()] == ["2024-02-29", "2024-02-29"]
    assert run_dir.root == tmp_path / "r"
    assert run_dir.read_date() == ("2024-02-29" if is_kept else "")
