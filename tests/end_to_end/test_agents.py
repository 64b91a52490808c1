"""Programs that own their loop are trained: the documentation's examples in small real runs."""

import json
import sys
from pathlib import Path

import pytest

from common.wire.messages import EpisodeKind
from learner.journal.journal import read_journal
from tests.end_to_end.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLES = {
    "agent.py": ["run", sys.executable, "docs/examples/agent.py"],
    "agent.sh": ["episode", "sh", "docs/examples/agent.sh"],
    "agent_many.py": ["run", sys.executable, "docs/examples/agent_many.py", "16"],
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_agent_is_trained_and_evaluated(example: str, tmp_path: Path) -> None:
    lifetime, *command = EXAMPLES[example]
    told = json.dumps(command)
    how = ("actor.endpoint=true", f"actor.agent={told}", f"actor.agent_lifetime={lifetime}")
    with Run(tmp_path, *how, "train.num_steps=2", "eval.before=false") as run:
        assert run.wait(timeout_s=600.0) == 0, run.output[-3_000:]
        episodes = [each for _, each in read_journal(run.root / "journal")]
        ledger = json.loads((run.root / "ledger.json").read_text(encoding="utf-8"))
    assert ledger["trained"] >= 8
    assert ledger["failed"] == 0
    played = [each for each in episodes if not each.end_reason.is_infrastructure_failure]
    assert {each.kind for each in played} == {EpisodeKind.TRAIN, EpisodeKind.EVAL}
    rewritten = [each for each in played if each.num_turns > 1 and len(each.segment_starts)]
    assert bool(rewritten) == (example == "agent.sh")  # it forgets: a segment for each turn
