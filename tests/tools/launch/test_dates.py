"""Laws of the date that a command's prompts name."""

from pathlib import Path

import pytest

import run as command_line
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.formats.chat_template import prompt_date
from common.store.run_dir import RunDir
from tools.launch.commands import with_date

KEPT = ("sft", "evolve", "eval")
ONCE = ("dpo", "serve")


@pytest.mark.parametrize("is_kept", [True, False])
def test_command_and_its_prompts_have_one_date(is_kept: bool, tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "r")
    seen: list[str] = []

    def note(cfg: RunConfig, _: RunDir) -> int:
        seen.extend([cfg.model.date, prompt_date()])
        return 7

    cfg = RunConfig(model=ModelSection(path="m", date="2024-02-29"))
    assert with_date(note, cfg, run_dir, is_kept=is_kept) == 7
    assert seen == ["2024-02-29", "2024-02-29"]
    assert run_dir.read_date() == ("2024-02-29" if is_kept else "")


def test_every_prompt_command_fixes_its_date() -> None:
    for name in (*KEPT, *ONCE):
        assert command_line.COMMANDS[name].keeps_date is (name in KEPT), name
