"""Laws of whole runs whose rewards compare the members of a group."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY, Run, unbounded

OVERRIDES = (
    "train.num_steps=2",
    "groups.size=4",
    "groups.per_step=4",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "actor.max_concurrent=32",
)
EXAMPLE = "docs/examples/dataset/groups.py"

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def test_run_trains_on_the_rewards_of_groups_and_recomputes_them(tmp_path: Path) -> None:
    reward = f"groups.reward={{rank: {EXAMPLE}:shortest_right, diverse: {EXAMPLE}:diversity}}"
    with Run(tmp_path, *OVERRIDES, reward, config="dataset") as run:
        assert run.wait(timeout_s=900) == 0, run.output[-3000:]
        lines = run.metrics()
        assert len(lines) == 2
        assert lines[0]["group_rewards/failed"] == 0.0
        assert {"group_rewards/rank_mean", "group_rewards/diverse_mean"} <= lines[0].keys()
        logged = (run.root / "journal" / "group_rewards.jsonl").read_text(encoding="utf-8")
        groups = {json.loads(line)["group"] for line in logged.splitlines()}
        steps = (run.root / "journal" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
        trained = {ids[0].partition("/")[0] for s in steps for ids in json.loads(s)["groups"]}
        assert len(trained) == 8
        assert trained <= groups
        assert unbounded(run.root) == []
    command = [sys.executable, "run.py", "recompute", "r", f"run.dir={tmp_path}"]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "equal: all 3 checksums" in done.stdout


def test_served_model_judges_the_groups_of_a_run(tmp_path: Path) -> None:
    """The judge is a model behind vLLM's server, which limits its reply to one score a member."""
    policy = "model.path=configs/policies/tiny-arithmetic"
    # This judge has learned no end of a text: it would write white space without an end.
    grammar = "{backend: xgrammar, disable_any_whitespace: true}"
    strict = f"actor.engine_args={{structured_outputs_config: {grammar}}}"
    judge_of = [policy, strict, f"run.dir={tmp_path}", "run.name=judge"]
    command = [sys.executable, "run.py", "serve", *judge_of]
    with (
        (tmp_path / "judge.txt").open("wb") as log,
        subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=log, encoding="utf-8"
        ) as judge,
    ):
        assert judge.stdout is not None
        try:
            lines = (re.match(r"policy: (\S+) model=(\S+)", line) for line in judge.stdout)
            url, model = next(match for match in lines if match).groups()
            term = f"groups.reward={{judged: {{function: {EXAMPLE}:judged, timeout_s: 120}}}}"
            env = {"JUDGE_URL": url, "JUDGE_MODEL": model}
            with Run(tmp_path, *OVERRIDES, term, config="dataset", env=env) as run:
                assert run.wait(timeout_s=900) == 0, run.output[-3000:]
                logged = (run.root / "journal" / "group_rewards.jsonl").read_text(encoding="utf-8")
        finally:
            judge.send_signal(signal.SIGINT)
            judge.wait(60)
    groups = [json.loads(line) for line in logged.splitlines()]
    assert len(groups) >= 8
    assert [group["error"] for group in groups if "error" in group] == []
    assert {len(group["values"]["judged"]) for group in groups} == {4}


def test_games_of_several_seats_have_rewards_of_groups(tmp_path: Path) -> None:
    reward = f"groups.reward={EXAMPLE}:wins"
    with Run(tmp_path, *OVERRIDES, reward, config="selfplay-nim") as run:
        assert run.wait(timeout_s=900) == 0, run.output[-3000:]
        lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["group_rewards/failed"] == 0.0
    assert 0.0 < lines[0]["group_rewards/wins_mean"] < 1.0


def test_function_that_fails_ends_the_run_with_its_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def rank(group):\n    return [1.0]\n", encoding="utf-8")
    with Run(tmp_path, *OVERRIDES, f"groups.reward={path}:rank", config="dataset") as run:
        assert run.wait(timeout_s=900) == 1, run.output[-3000:]
        assert "returned 1 numbers for a group of 4 finished members" in run.output
        assert run.read("ledger.json")["trained"] == 0
