"""What the tests of offline methods share: commands, and a policy's loss on episodes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from learner.policy.model import Scoring, load_policy, token_logprobs
from tests.end_to_end.runs import REPOSITORY
from tools.offline.rows import Row, read_rows, token_batch

BASE = REPOSITORY / "configs/policies/tiny"
RATES = (
    "sft.num_epochs=4",
    "sft.batch_tokens=1024",
    "sft.optimizer=muon",
    "sft.lr=1e-3",
    "sft.muon_lr=5e-3",
)


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


def episodes(journal: Path) -> list[Row]:
    """Return the episodes of a journal as training rows, oldest first."""
    tokenizer = AutoTokenizer.from_pretrained(BASE, local_files_only=True)
    return read_rows(journal, tokenizer=tokenizer, max_tokens=512, key="journal")


def successes(journal: Path) -> list[Row]:
    return [row for row in episodes(journal) if row.reward >= 1.0]


@torch.no_grad()
def logprobs_of(policy: Path, rows: Sequence[Row]) -> torch.Tensor:
    """Return [row] summed log-probabilities of the agent's tokens."""
    model = load_policy(str(policy), device="cpu")
    totals = []
    for row in rows:
        how = Scoring(chunk_tokens=512, dtype=torch.float32)
        found = token_logprobs(model, token_batch([row], "cpu", is_packed=False), how)
        totals.append(found.sum())
    return torch.stack(totals)


def loss_of(policy: Path, rows: Sequence[Row]) -> float:
    """Return the mean negative log-likelihood of an agent token, in nats."""
    num_tokens = sum(int(row.mask[1:].sum()) for row in rows)
    return -float(logprobs_of(policy, rows).sum()) / num_tokens
