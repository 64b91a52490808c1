"""Laws of the wandb sink."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.config.log import LogSection, WandbMode
from common.errors import ConfigError
from common.repository import ROOT
from common.wire.messages import EpisodeKind
from learner.wandb_sink import check_mode, choose_mode, has_account
from tests.tools.dashboard.runs import append, episode, make_run

NOBODY = {"HOME": "/nonexistent"}
AUTO = LogSection(wandb=WandbMode.AUTO)


def test_auto_mode_is_offline_without_an_account() -> None:
    assert choose_mode(AUTO, NOBODY) is WandbMode.OFFLINE


def test_auto_mode_is_online_with_a_key(tmp_path: Path) -> None:
    assert choose_mode(AUTO, {**NOBODY, "WANDB_API_KEY": "k" * 40}) is WandbMode.ONLINE
    (tmp_path / ".netrc").write_text(
        "machine api.wandb.ai\n login user\n password abc\n", encoding="utf-8"
    )
    assert choose_mode(AUTO, {"HOME": str(tmp_path)}) is WandbMode.ONLINE


def test_foreign_or_broken_netrc_is_no_account(tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine example.org\n login user\n password abc\n", encoding="utf-8")
    assert not has_account({**NOBODY, "NETRC": str(netrc)})
    netrc.write_text("machine machine password", encoding="utf-8")
    assert not has_account({**NOBODY, "NETRC": str(netrc)})


def test_online_mode_without_account_falls_back_offline() -> None:
    assert choose_mode(LogSection(wandb=WandbMode.ONLINE), NOBODY) is WandbMode.OFFLINE


@pytest.mark.parametrize("mode", [WandbMode.OFFLINE, WandbMode.DISABLED])
def test_configured_mode_wins_when_a_key_exists(mode: WandbMode) -> None:
    environ = {**NOBODY, "WANDB_API_KEY": "k" * 40}
    assert choose_mode(LogSection(wandb=mode), environ) is mode
    assert choose_mode(AUTO, {**environ, "WANDB_MODE": mode.value}) is mode


@pytest.mark.parametrize(
    ("wish", "mode"),
    [
        ("online", WandbMode.ONLINE),
        ("run", WandbMode.ONLINE),
        ("shared", WandbMode.ONLINE),
        (" Online ", WandbMode.ONLINE),
        ("", WandbMode.ONLINE),  # As without the variable: the account decides.
        ("offline", WandbMode.OFFLINE),
        ("OFFLINE", WandbMode.OFFLINE),
        ("dryrun", WandbMode.OFFLINE),
        ("DryRun", WandbMode.OFFLINE),
        ("disabled", WandbMode.DISABLED),
        ("Disabled", WandbMode.DISABLED),
    ],
)
def test_every_spelling_of_the_mode_is_understood(wish: str, mode: WandbMode) -> None:
    environ = {**NOBODY, "WANDB_API_KEY": "k" * 40, "WANDB_MODE": wish}
    assert choose_mode(AUTO, environ) is mode


@pytest.mark.parametrize("wish", ["off", "dry-run", "true", "onlin", "0"])
def test_unknown_mode_is_refused_by_name(wish: str) -> None:
    environ = {**NOBODY, "WANDB_API_KEY": "k" * 40, "WANDB_MODE": wish}
    with pytest.raises(ConfigError, match=f"^WANDB_MODE={wish}: must be one of online, run"):
        choose_mode(AUTO, environ)
    with pytest.raises(ConfigError, match=f"^WANDB_MODE={wish}"):
        check_mode(AUTO, environ)
    check_mode(LogSection(wandb=WandbMode.OFFLINE), environ)  # The configuration decides.


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        ("true", WandbMode.DISABLED),
        ("1", WandbMode.DISABLED),
        ("YES", WandbMode.DISABLED),
        ("false", WandbMode.ONLINE),
        ("", WandbMode.ONLINE),
    ],
)
def test_variable_that_disables_wandb_is_honoured(value: str, mode: WandbMode) -> None:
    environ = {**NOBODY, "WANDB_API_KEY": "k" * 40, "WANDB_DISABLED": value}
    assert choose_mode(AUTO, environ) is mode
    with pytest.raises(ConfigError, match=r"^WANDB_DISABLED=perhaps: must be true or false"):
        choose_mode(AUTO, {**environ, "WANDB_DISABLED": "perhaps"})


def test_missing_home_yields_no_account() -> None:
    assert not has_account({"HOME": ""})


def run_sink(root: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import sys, pathlib, logging\n"
        "logging.basicConfig(level='WARNING')\n"
        "from common.config.run_config import ModelSection, RunConfig\n"
        "from common.store.run_dir import RunDir\n"
        "from learner.wandb_sink import WandbSink\n"
        "cfg = RunConfig(model=ModelSection(path='m'))\n"
        "run_dir = RunDir(root=pathlib.Path(sys.argv[1]))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    home = root / "home"
    home.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", head + script, str(root / "run")],
        cwd=ROOT,
        check=False,
        env={**kept, "HOME": str(home), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.long
def test_sink_without_account_writes_silently_offline(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "assert sink.mode.value == 'offline', sink.mode\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.log(2, {'reward/mean': 0.6})\n"
        "sink.close()\n"
        "sink.log(3, {'reward/mean': 0.7})\n"
    )
    done = run_sink(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/mean" in log.read_bytes()


@pytest.mark.slow
@pytest.mark.long
def test_sink_accepts_alternative_spellings_of_offline(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "assert sink.mode.value == 'offline', sink.mode\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script, WANDB_API_KEY="0" * 40, WANDB_MODE="DryRun")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.slow
def test_unreachable_wandb_falls_back_offline_with_warning(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg, init_timeout_s=2.0)\n"
        "assert sink.mode.value == 'offline', sink.mode\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("wandb failed") == 1
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.long
@pytest.mark.slow
def test_broken_wandb_disables_the_sink_with_warning(tmp_path: Path) -> None:
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "import wandb\n"
        "wandb.finish()\n"
        "sink.log(1, {'reward/mean': 0.5})\n"
        "sink.log(2, {'reward/mean': 0.5})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb failed") == 1


def records_of(log: Path) -> Iterator[Any]:
    """Yield what an offline file holds: blocks of 32 KiB of chunks, as LevelDB's log."""
    from wandb.proto import wandb_internal_pb2

    record_type: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    text, at, whole = log.read_bytes(), 7, b""
    while at + 7 <= len(text):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(text[at + 4 : at + 6], "little"), text[at + 6]
        whole += text[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record_type.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_ended_evaluation_is_logged_exactly_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    for name, number in {"before-model": 3, "step-2-model": 4, "step-4-model": 5}.items():
        played = replace(episode(number), kind=EpisodeKind.EVAL, group_id=f"eval-{name}")
        append(run_dir, replace(played, episode_id=f"eval-{name}/0"))
    script = (
        "sink = WandbSink(run_dir, cfg)\n"
        "sent = []\n"
        "log = sink._run.log\n"
        "sink._run.log = lambda values: (sent.append(sorted(values)), log(values))\n"
        "def told():\n"
        "    sink._telling and sink._telling.join()\n"
        "    return [n for names in sent for n in names if n.startswith('samples')]\n"
        "sink.log(1, {'loss/policy': 0.5})\n"
        "assert told() == ['samples/before-model'], sent\n"
        "lines = run_dir.root / 'eval.jsonl'\n"
        'lines.write_text(\'{"group_id": "eval-step-2-model"}\\n\')\n'
        "sink.log(3, {'loss/policy': 0.5})\n"
        "assert told() == ['samples/before-model', 'samples/step-2-model'], sent\n"
        "sink.log(4, {'loss/policy': 0.5})\n"
        "assert len(told()) == 2\n"
        "sink.close()\n"
        "assert told()[2:] == ['samples/step-4-model'], sent\n"
    )
    done = run_sink(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_offline_files_keep_evaluations_and_omit_nan(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    versions = {"before-model": 0, "step-4-model": 4, "after-model": 6, "before-expert": 0}
    for number, (name, version) in enumerate(versions.items(), 3):
        played = replace(episode(number), kind=EpisodeKind.EVAL, group_id=f"eval-{name}")
        played = replace(played, opened_at_version=version)
        append(run_dir, replace(played, episode_id=f"eval-{name}/0"))
    script = (
        "for first in (1, 3):\n"  # the second start resumes
        "    sink = WandbSink(run_dir, cfg)\n"
        "    for step in (first, first + 1):\n"
        "        nan = float('nan')\n"
        "        values = {'loss/policy': nan if step == 3 else 0.5, 'odd/count': 1.0}\n"
        "        sink.log(step, values)\n"
        "    sink.close()\n"
        "sink = WandbSink(run_dir, cfg, job='sft')\n"
        "sink.log(1, {'sft/loss': 2.0})\n"
        "sink.close()\n"
    )
    done = run_sink(tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    logs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    history: list[dict[str, str]] = []
    hidden: set[str] = set()
    for log in logs:
        for record in records_of(log):
            items = record.history.item
            names_of = {each.key or "/".join(each.nested_key): each.value_json for each in items}
            history += [names_of] if names_of else []
            if record.HasField("metric") and record.metric.options.hidden:
                hidden.add(record.metric.name)
    assert len({log.stem for log in logs}) == 2  # ids: of training, resumed, and of sft
    assert not [value for line in history for value in line.values() if "NaN" in value]
    assert [line["sft/loss"] for line in history if "sft/loss" in line] == ["2"]
    curve = {(line["step"], line["eval/success"]) for line in history if "eval/success" in line}
    assert {step for step, _ in curve} == {"0", "4", "6"}
    assert [line for line in history if "eval/before-expert/success" in line]
    tables = {k.rpartition("/")[0] for line in history for k in line if k.endswith("/nrows")}
    assert tables == {f"samples/{name}" for name in versions}
    assert hidden == {"odd/count"}
