"""Laws of `show`, `replay` and the details of `status`."""

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.config.load import load_config
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, save_config
from learner.recovery.reward_log import GroupReward, RewardLog
from run import main
from tests.tools.dashboard.runs import append, episode, make_run
from tools.cli.command_line import parse
from tools.dashboard.run_state import details
from tools.dashboard.run_view import view_run
from tools.dashboard.show import replay, show
from tools.dashboard.terminal import load_of_any_version
from tools.dashboard.words import status_line


def said(tmp_path: Path, command: str, *words: str) -> tuple[int, str]:
    request = parse([command, *words, f"run.dir={tmp_path}"])
    act = {"show": show, "replay": replay}[command]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = act(request)
    return code, output.getvalue().removesuffix("\n")


def test_show_prints_matching_episodes_as_conversations(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    code, text = said(tmp_path, "show", "a", "--failed", "--group", "g0000000")
    assert code == 0
    assert text.count("===") == 2
    assert "=== g0000000/1 · babyai GoTo-train-0 · reward 0 · advantage -0.667" in text
    assert "--- agent 1 (version 3 -> 4)" in text
    assert "2 of 2 matching episodes shown; 40 episodes in all" in text
    code, text = said(tmp_path, "show", "a", "--best", "num=1", "outcome=trained")
    assert text.count("===") == 1
    assert "reward 1" in text
    assert said(tmp_path, "show", "a", "--item", "none")[0] == 1


def test_reward_of_a_group_stands_beside_that_of_the_environment(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", num_steps=2)
    reward = GroupReward(group_id="g0000000", rewards={0: 0.25, 1: 0.75})
    log = RewardLog(run_dir.group_rewards)
    log.append(reward)
    log.close()
    headlines = said(tmp_path, "show", "a", "--group", "g0000000")[1]
    assert "· reward 0 · group reward 0.75 ·" in headlines
    assert headlines.count("group reward") == 2
    lines = [{"step": n, "reward/success": 0.5, "group_rewards/mean": n / 4} for n in (1, 2)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    run_dir.metrics.write_text(text, encoding="utf-8")
    cfg = load_config("smoke", [])
    view = view_run(run_dir, cfg.train, cfg.horizon)
    assert "success 0.50 group reward 0.38" in status_line(view)


def test_replay_prints_one_episode(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    code, text = said(tmp_path, "replay", "a", "g0000003/2")
    assert code == 0
    assert text.startswith("=== g0000003/2 ")
    assert ", invalid action" in text
    with pytest.raises(ConfigError, match=r"g0000003/9: run a has no such episode"):
        said(tmp_path, "replay", "a", "g0000003/9")


def test_printed_text_cannot_control_the_terminal(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from tests.tools.dashboard.runs import TOKENIZER

    run_dir = make_run(tmp_path / "a", 0)
    ids = Tokenizer.from_file(str(TOKENIZER)).encode("\x1b[2J\x07 \u202e abc \x9b31m").ids
    append(run_dir, episode(0, text_ids=ids))
    _, text = said(tmp_path, "replay", "a", "g0000000/0")
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)


@pytest.mark.parametrize("words", [(), ("a", "b"), ("a", "num=0"), ("a", "colour=red"), ("no",)])
def test_show_names_the_wrong_argument(tmp_path: Path, words: tuple[str, ...]) -> None:
    make_run(tmp_path / "a", 1)
    with pytest.raises(ConfigError):
        said(tmp_path, "show", *words)


def test_only_show_accepts_filters() -> None:
    with pytest.raises(ConfigError, match="only the command show accepts them"):
        parse(["status", "--failed"])


def test_status_names_a_run_without_its_key() -> None:
    assert parse(["status", "mine"]).overrides == ["run.name=mine"]


def test_status_names_a_run_by_its_path(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    found = parse(["status", str(tmp_path / "a")]).overrides
    assert found == [f"run.dir={tmp_path}", "run.name=a"]


def test_status_of_another_version_shows_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "a", num_steps=7)
    overrides = [f"run.dir={tmp_path}", "run.name=a", "train.num_steps=7"]
    run_dir.config.unlink()
    save_config(load_config("smoke", overrides), run_dir.config)
    config = run_dir.config.read_text(encoding="utf-8")
    assert main(["status", str(run_dir.root), "foo.x=1"]) == 2  # the request's own fault
    capsys.readouterr()
    for damage in (f"ancient: {{x: 1}}\n{config}", "run: [1\n", None):
        run_dir.config.unlink()
        if damage is not None:
            run_dir.config.write_text(damage, encoding="utf-8")
        assert main(["status", str(run_dir.root)]) == 0
        said = capsys.readouterr().out
        assert said.startswith("note: ")
        assert "Another version may have written this run" in said
        assert "step 7/" in said
        assert "episodes: issued 41" in said
    with pytest.raises(ConfigError):
        load_of_any_version(parse(["status", "no"]))


def test_status_lists_the_commands_beside_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "with", num_steps=7)
    for name in ("with", "without"):
        part = RunDir(root=tmp_path / name / "sft")
        part.root.mkdir(parents=True)
        part.metrics.write_text('{"step": 12}\n', encoding="utf-8")
    assert main(["status", "run.name=without", f"run.dir={tmp_path}"]) == 0
    assert capsys.readouterr().out == f"{part.root}: stopped at step 12\n"
    mark_finished(RunDir(root=run_dir.root / "sft"), version=12, result="")
    assert main(["status", "run.name=with", f"run.dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"{run_dir.root}: ") for line in lines)
    assert lines[-1] == f"{run_dir.root / 'sft'}: finished at step 12"


def test_quick_doctor_lists_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--quick"])
    said = capsys.readouterr().out
    for what in (
        "python",
        "torch",
        "vllm",
        "gpu",
        "cores",
        "memory",
        "disk",
        "run folder",
        "ports",
    ):
        assert f"  {what}" in said
    assert "c++" not in said
    assert main(["status", "--quick"]) == 2


def test_quick_doctor_reports_an_unwritable_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["doctor", "--quick", f"run.dir={tmp_path / 'file' / 'runs'}"]) == 1
    assert "set run.dir to a writable folder" in capsys.readouterr().out


def test_informational_commands_load_no_heavy_library() -> None:
    heavy = "{'torch', 'vllm', 'ray', 'transformers', 'wandb', 'fastapi'}"
    for words in (["--help"], ["doctor", "--quick"], ["status", "no-such-run"]):
        script = (
            f"import sys; from run import main\ntry: main({words})\nexcept SystemExit: pass\n"
            f"sys.exit(repr({heavy} & set(sys.modules)) if {heavy} & set(sys.modules) else 0)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)


def test_status_shows_the_ledger_and_the_limit(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    lines = details(load_config("smoke", []), run_dir)
    assert lines[0].startswith("episodes: issued 41 = trained 4 + filtered 4 + stale 0 + failed 1")
    assert lines[-1].startswith("limit: ")


@pytest.mark.slow
def test_closed_output_ends_a_command_without_a_traceback() -> None:
    command = f"{sys.executable} run.py help reference | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, encoding="utf-8", check=False
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_configuration_of_another_version_keeps_its_known_keys(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", num_steps=7)
    overrides = [f"run.dir={tmp_path}", "run.name=a", "algorithm.advantage=rloo"]
    run_dir.config.unlink()
    save_config(load_config("smoke", [*overrides, "actor.num_actors=3"]), run_dir.config)
    text = run_dir.config.read_text(encoding="utf-8")
    run_dir.config.unlink()
    run_dir.config.write_text(f"ancient: {{x: 1}}\n{text}", encoding="utf-8")
    request = parse(["status", f"run.dir={tmp_path}", "run.name=a"])
    cfg = load_of_any_version(request)
    assert (cfg.algorithm.advantage, cfg.actor.num_actors) == ("rloo", 3)
