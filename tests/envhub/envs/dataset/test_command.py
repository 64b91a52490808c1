"""Laws of the commands on a dataset: mistakes are refused before a start."""

from pathlib import Path

import pytest

import run
from common.config.load import load_config
from common.repository import ROOT, STARTED_FROM
from tests.envhub.envs.dataset.made import GSM8K, write_lines
from tools.cli.command_line import parse


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
        asked = parse(["--config", name, "--dry-run"])
        cfg = load_config(asked.config, [], is_dry=True)
        assert [task.env for task in cfg.tasks] == ["dataset"]
        assert cfg.envs.dataset.train == "configs/data/arithmetic"
        assert cfg.horizon.stages[0] >= cfg.envs.dataset.max_turns


@pytest.mark.slow
def test_prompt_longer_than_the_context_is_refused_and_named_by_check_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"question": "Tom has 3 pens. " * 40 + "How many?", "answer": "120"}
    data = write_lines(tmp_path / "mine.jsonl", [*GSM8K, long])
    overrides = (f"data.train={data}", "data.eval_size=1")
    why = "1 of 4 first prompts have more than the 112 tokens that fit"
    refused = refusal(capsys, *overrides)
    assert why in refused
    assert "record 4 of mine.jsonl" in refused
    check = ["check-env", "dataset", "items=1", *overrides, "reward=exact_number"]
    model = "model.path=configs/policies/tiny-arithmetic"
    assert run.main([*check, model, "actor.max_model_len=128", "actor.max_turn_tokens=16"]) == 1
    assert f"FAIL prompts     actor.max_model_len=128: {why}" in capsys.readouterr().out
    assert run.main([*check, model, "actor.max_model_len=4096"]) == 0
    assert "4 first prompts within" in capsys.readouterr().out
