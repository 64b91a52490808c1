"""Laws of a batch of long episodes: its step takes the planned memory at any number of turns."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.repository import CODE

MICROBATCH = 4_096
PER_TOKEN = 90  # Bytes of the batch's columns for each of its tokens.


def peak_of(folder: Path, *, num_episodes: int, num_turns: int) -> dict[str, int]:
    """Return the measured and the planned bytes of a step, and the tokens of its batch."""
    module = "tests.learner.training.peak_of_batch"
    sizes = map(str, (num_episodes, num_turns, MICROBATCH))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, str(folder / "policy"), *sizes],
        cwd=CODE,
        # The allocator returns each block of a mebibyte to the system at once.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_episodes", "num_turns"),
    [(4, 100), pytest.param(8, 1_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_batch_of_long_episodes_takes_the_planned_memory(
    num_episodes: int, num_turns: int, tmp_path: Path
) -> None:
    for _ in range(3):  # Unrelated memory of the process only adds to a peak.
        sizes = peak_of(tmp_path, num_episodes=num_episodes, num_turns=num_turns)
        bound = 1.1 * sizes["planned"] + PER_TOKEN * sizes["tokens"]
        if sizes["measured"] <= bound:
            break
    assert sizes["tokens"] == num_episodes * num_turns * 100
    assert 0.9 * sizes["planned"] <= sizes["measured"] <= bound
