"""Laws of the commands on a dataset: mistakes are refused before a start."""

from pathlib import Path

import pytest

import run
from common.config.command_line import parse
from common.config.load import load_config
from common.repository import ROOT, STARTED_FROM
from tests.envhub.envs.dataset.made import GSM8K, write_lines


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run.main(["--config", "dataset", "--dry-run", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_mistake_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STARTED_FROM, str(tmp_path))  # It is restored after the test.
    monkeypatch.chdir(tmp_path)
    assert "data.train=no.jsonl: no such file or folder" in refusal(capsys, "data.train=no.jsonl")
    write_lines(tmp_path / "mine.jsonl", GSM8K)
    own = ("data.train=mine.jsonl", "data.eval_size=1")
    assert "reward=scorer:f: no module 'scorer'" in refusal(capsys, *own, "reward=scorer:f")
    (tmp_path / "scorer.py").write_text("def f(completion): return 1\n", encoding="utf-8")
    assert run.main(["--config", "dataset", "--dry-run", *own, "reward=scorer.py:f"]) == 0


@pytest.mark.slow
def test_changed_data_are_refused_when_a_run_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_lines(tmp_path / "mine.jsonl", GSM8K)
    own = (f"data.train={data}", "data.eval_size=1", f"run.dir={tmp_path}")
    folder = tmp_path / "dataset"
    folder.mkdir()
    digests = '{"dataset": {"data.train": "0123456789abcdef"}}'
    (folder / "item_digests.json").write_text(digests, encoding="utf-8")
    assert "data.train changed since the run began (sha256 0123456789ab, now" in refusal(
        capsys, *own
    )


def test_presets_for_gpus_have_the_problems_of_the_preset() -> None:
    names = [path.stem for path in (ROOT / "configs").glob("dataset-qwen3-*.yaml")]
    assert len(names) == 7
    for name in names:
        asked = parse(["--config", name, "--dry-run"], root=ROOT)
        cfg = load_config(asked.config, [], root=ROOT, is_dry=True)
        assert [task.env for task in cfg.tasks] == ["dataset"]
        assert cfg.envs.dataset.train == "configs/data/arithmetic"
        assert cfg.horizon.stages[0] >= cfg.envs.dataset.max_turns
