"""The evaluation behind AgentGym-RL's Tables 1 to 5, scaled down: a few items of three of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.actor.toy_servers import ToyEndpoint, serve
from tests.end_to_end.runs import REPOSITORY

TABLES = {  # environment: the columns of its table
    "searchqa": ["NQ", "TriviaQA", "PopQA", "HotpotQA", "2Wiki", "Musique", "Bamboogle"],
    "textcraft": ["Depth 1", "Depth 2", "Depth 3", "Depth 4"],
    "babyai": ["GoTo", "Pickup", "AOD", "Find", "Room", "SLoc"],
}
SUBSETS = {
    "searchqa": ["nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"],
    "textcraft": ["depth1", "depth2", "depth3", "depth4"],
    "babyai": ["GoTo", "Pickup", "AOD", "Find", "Room", "SLoc"],
}
TURNS = {"searchqa": 30, "textcraft": 30, "babyai": 20}
NUM_ITEMS = 60


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_paper_tables_use_published_turns_and_layout(tmp_path: Path):
    tasks = [f"{{env: {env}, subset: {subset}}}" for env in TABLES for subset in SUBSETS[env]]
    endpoint = ToyEndpoint()  # Always answers "go", an invalid action.
    with serve(endpoint.app()) as url:
        argv = [sys.executable, "run.py", "eval", "--config", "agentgym-paper-tables"]
        argv += [f"run.dir={tmp_path}", "run.name=p", f"tasks=[{', '.join(tasks)}]"]
        argv += [f"policy.url={url}/v1", "policy.model=toy", f"eval.num_items={NUM_ITEMS}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            argv, cwd=REPOSITORY, capture_output=True, encoding="utf-8", timeout=450, env=env
        )
    assert done.returncode == 0, done.stderr[-2_000:]
    (entry,) = json.loads((tmp_path / "p/eval.json").read_text(encoding="utf-8"))["entries"]
    assert entry["overall"]["num_episodes"] == NUM_ITEMS
    assert entry["overall"]["num_failed"] == 0
    for env, columns in TABLES.items():
        assert f"| Model |  | {' | '.join(columns)} | Overall |" in done.stdout
        found = entry["by_env"][env]
        assert set(found["by_subset"]) <= {*SUBSETS[env]}  # some are too small for a tenth
        assert (found["success"]["mean"], found["num_turns"]) == (0.0, TURNS[env])
    assert (
        "The tasks differ from the published ones: own recipes instead of Minecraft's."
        in done.stdout
    )
    assert (
        "The tasks differ from the published ones: questions about a generated world."
        in done.stdout
    )
    assert f"eval.num_items={NUM_ITEMS} skips 530 of the 590 held-out items" in done.stderr
