"""The offline methods as commands, from played episodes to a better policy."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from common.config.offline import DpoSection
from learner.offline.dpo import make_pairs, preference_loss
from learner.offline.rows import Row, read_rows, token_batch
from learner.policy.model import Scoring, load_policy, token_logprobs
from tests.end_to_end.runs import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BASE = REPOSITORY / "configs/policies/tiny"
NUM_ITEMS, NUM_SAMPLES = 70, 3
RATES = ("sft.num_epochs=4", "sft.batch_tokens=1024", "sft.lr=1e-3", "sft.muon_lr=5e-3")


def run(folder: Path, command: str, *overrides: str) -> str:
    """Run a command on one level of the quickstart; return what it printed."""
    argv = [sys.executable, "run.py", command, "--config", "smoke", f"run.dir={folder}"]
    done = subprocess.run(
        [*argv, f"run.name={command}", *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    return done.stdout


@pytest.fixture(scope="module")
def evolved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run one iteration of AgentEvol; the folder holds its journal and its policy."""
    folder = tmp_path_factory.mktemp("evolved")
    played = (f"evolve.items_per_iteration={NUM_ITEMS}", f"evolve.samples_per_item={NUM_SAMPLES}")
    output = f"evolve.output={folder}/policy"
    said = run(folder, "evolve", "evolve.num_iterations=1", *played, *RATES, output)
    assert said.splitlines()[-1] == f"policy: {folder}/policy"
    return folder


def episodes(folder: Path) -> list[Row]:
    tokenizer = AutoTokenizer.from_pretrained(BASE, local_files_only=True)
    journal = folder / "evolve" / "iteration-0" / "journal"
    return read_rows(journal, tokenizer=tokenizer, max_tokens=512, key="journal")


def successes(folder: Path) -> list[Row]:
    return [row for row in episodes(folder) if row.reward >= 1.0]


@torch.no_grad()
def logprobs_of(policy: Path, rows: Sequence[Row]) -> torch.Tensor:
    """Return [row] summed log-probabilities of the agent's tokens."""
    model = load_policy(str(policy), device="cpu", gradient_checkpointing=False)
    totals = []
    for row in rows:
        how = Scoring(chunk_tokens=512, autocast=False)
        found = token_logprobs(model, token_batch([row], "cpu", is_packed=False), how)
        totals.append(found.sum())
    return torch.stack(totals)


def loss_of(policy: Path, rows: Sequence[Row]) -> float:
    """Return the mean negative log-likelihood of an agent token, in nats."""
    num_tokens = sum(int(row.mask[1:].sum()) for row in rows)
    return -float(logprobs_of(policy, rows).sum()) / num_tokens


def test_evolve_trains_on_its_successful_episodes(evolved: Path) -> None:
    summary = json.loads(
        (evolved / "evolve" / "iteration-0" / "played.json").read_text(encoding="utf-8")
    )
    assert summary["episodes"] == NUM_ITEMS * NUM_SAMPLES
    kept = successes(evolved)
    assert len(kept) == summary["successes"] > NUM_ITEMS
    lost = [row for row in episodes(evolved) if row.reward < 1.0]
    gain = loss_of(BASE, kept) - loss_of(evolved / "policy", kept)
    assert gain > 0.02
    assert gain > loss_of(BASE, lost) - loss_of(evolved / "policy", lost)


def test_sft_on_a_journal_learns_newest_successes(evolved: Path, tmp_path: Path) -> None:
    rows = successes(evolved)
    num_trained = len(rows) // 2
    run(
        tmp_path,
        "sft",
        "sft.from_scratch=false",
        f"sft.demonstrations={evolved}/evolve/iteration-0",
        "sft.min_reward=1",
        f"sft.max_episodes={num_trained}",
        *RATES,
        f"sft.output={tmp_path}/policy",
    )
    taken = rows[-num_trained:]
    assert loss_of(tmp_path / "policy", taken) < loss_of(BASE, taken) - 0.02


def test_dpo_prefers_the_successes_of_journal_pairs(evolved: Path, tmp_path: Path) -> None:
    pairs = make_pairs(episodes(evolved), DpoSection(max_pairs_per_item=1), seed=0)
    num_trained = 2 * len(pairs) // 3
    assert num_trained >= 10
    run(
        tmp_path,
        "dpo",
        f"dpo.data={evolved}/evolve/iteration-0",
        "dpo.max_pairs_per_item=1",
        f"dpo.max_pairs={num_trained}",
        "dpo.num_epochs=6",
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
