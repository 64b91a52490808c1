"""The offline methods as commands, from played episodes to a better policy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.offline import BASE, RATES, episodes, logprobs_of, loss_of, run, successes
from tools.offline.config import DpoSection
from tools.offline.dpo import make_pairs, preference_loss

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

JOURNAL = "evolve/iteration-0/journal"
NUM_ITEMS, NUM_SAMPLES = 70, 3


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one iteration of AgentEvol; the folder holds its journal and its policy."""
    folder = tmp_path_factory.mktemp("evolved")
    played = (f"evolve.items_per_iteration={NUM_ITEMS}", f"evolve.samples_per_item={NUM_SAMPLES}")
    output = f"evolve.output={folder}/policy"
    said = run(folder, "evolve", "evolve.num_iterations=1", *played, *RATES, output)
    assert said.splitlines()[-1] == f"policy: {folder}/policy"
    return folder


def test_evolve_trains_on_its_successful_episodes(evolved: Path) -> None:
    summary = json.loads(
        (evolved / "evolve" / "iteration-0" / "played.json").read_text(encoding="utf-8")
    )
    assert summary["episodes"] == NUM_ITEMS * NUM_SAMPLES
    kept = successes(evolved / JOURNAL)
    assert len(kept) == summary["successes"] > NUM_ITEMS
    lost = [row for row in episodes(evolved / JOURNAL) if row.reward < 1.0]
    gain = loss_of(BASE, kept) - loss_of(evolved / "policy", kept)
    assert gain > 0.02
    assert gain > loss_of(BASE, lost) - loss_of(evolved / "policy", lost)


def test_dpo_prefers_the_successes_of_journal_pairs(evolved: Path, tmp_path: Path) -> None:
    pairs = make_pairs(episodes(evolved / JOURNAL), DpoSection(max_pairs_per_item=1), seed=0)
    num_trained = 2 * len(pairs) // 3
    assert num_trained >= 10
    run(
        tmp_path,
        "dpo",
        f"dpo.data={evolved}/evolve/iteration-0",
        "dpo.max_pairs_per_item=1",
        f"dpo.max_pairs={num_trained}",
        "dpo.num_epochs=6",
        "dpo.optimizer=muon",
        "dpo.lr=3e-4",
        "dpo.muon_lr=2e-3",
        f"dpo.output={tmp_path}/policy",
    )
    before = load_file(BASE / "model.safetensors")
    after = load_file(tmp_path / "policy" / "model.safetensors")
    assert any((before[name] != after[name]).any() for name in before)
    taken = pairs[:num_trained]
    scores, reference = (
        torch.stack(
            [
                logprobs_of(policy, [pair.chosen for pair in taken]),
                logprobs_of(policy, [pair.rejected for pair in taken]),
            ],
            dim=1,
        )
        for policy in (tmp_path / "policy", BASE)
    )
    losses, margins = preference_loss(scores, reference, beta=0.1)
    assert losses.mean() < 0.67  # log 2 = 0.693 where nothing was learnt
    assert (margins > 0).float().mean() > 0.6
