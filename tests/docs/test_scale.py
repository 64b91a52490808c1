"""The arithmetic of docs/SCALE.md follows from the figures on the same page."""

import re

import pytest

from common.repository import ROOT

TEXT = (ROOT / "docs/SCALE.md").read_text(encoding="utf-8")
EPISODE_TOKENS = 8_000
SAMPLED_TOKENS = 2_000
TURNS = 20
TRAINED_PER_GPU = 5_000
SAMPLED_PER_ENGINE = 6_000
LEASES_PER_S = 12_960
INTAKE_S = 141e-6 / 2_000  # CPU time for each token.
INTAKE_BYTES = 34.7e3 / 2_000
HUB_STEPS_PER_S = 11_667
WEIGHTS_GB = 16.4
NIC_GB_PER_S = 50
GPUS_PER_NODE = 8


def row(title: str) -> list[float]:
    """Return the numbers of the table row that begins with a title."""
    line = next(each for each in TEXT.splitlines() if each.startswith(f"| {title} |"))
    cells = line.split("|")[2:-1]
    found = [re.search(r"[\d,]*\.?\d+", cell) for cell in cells]
    return [float(each[0].replace(",", "")) for each in found if each is not None]


def about(wanted: list[float]) -> object:
    return pytest.approx(wanted, rel=0.06)


def test_loads_of_all_sizes_follow_from_the_rates() -> None:
    learners = row("GPUs of the learner")
    engines = row("engines")
    assert [a + b for a, b in zip(learners, engines, strict=True)] == [8, 80, 640]
    trained = row("episodes per second that the learner trains")
    assert trained == about([n * TRAINED_PER_GPU / EPISODE_TOKENS for n in learners])
    sampled = row("episodes per second that the engines sample")
    assert sampled == about([n * SAMPLED_PER_ENGINE / SAMPLED_TOKENS for n in engines])
    assert row("scheduler, share of a core") == about([n / LEASES_PER_S for n in trained])
    share = row("learner's intake, share of a core")
    assert share == pytest.approx([n * EPISODE_TOKENS * INTAKE_S for n in trained], rel=0.1)
    rate = row("learner's intake, MB/s")
    assert rate == about([n * EPISODE_TOKENS * INTAKE_BYTES / 1e6 for n in trained])
    steps = row("steps of environments per second")
    assert steps == about([n * TURNS for n in trained])
    assert row("TextCraft hubs") == pytest.approx([n / HUB_STEPS_PER_S for n in steps], rel=0.1)


def test_bytes_of_a_version_grow_with_nodes_and_not_workers() -> None:
    workers = row("engines")
    nodes = row("nodes with engines")
    assert nodes == [-(-n // GPUS_PER_NODE) for n in workers]
    copies = row("GB of a whole version, a copy for each node")
    assert copies == about([n * WEIGHTS_GB for n in nodes])
    unshared = row("GB of a whole version, a copy for each worker")
    assert unshared == about([n * WEIGHTS_GB for n in workers])
    changes = row("GB of a version as a delta, a copy for each node")
    assert changes == about([0.023 * n * WEIGHTS_GB for n in nodes])
    assert row("GB of host memory for it in each node") == [WEIGHTS_GB] * 3
    assert "the host memory would be 131 GB for 8 workers" in " ".join(TEXT.split())
    num_gb = GPUS_PER_NODE * WEIGHTS_GB
    assert num_gb == pytest.approx(131, rel=0.01)


@pytest.mark.parametrize(
    ("title", "num_gb"),
    [
        ("one copy over all nodes (`learner.shard_nodes=0`)", 4 * WEIGHTS_GB),
        ("a copy in each node (`learner.shard_nodes=1`, HSDP), between nodes", WEIGHTS_GB / 2),
    ],
)
def test_network_of_a_microbatch_follows_from_the_bytes(title: str, num_gb: float) -> None:
    bytes_gb, seconds, percent = row(title)
    assert bytes_gb == pytest.approx(num_gb, rel=0.06)
    assert seconds == pytest.approx(num_gb / NIC_GB_PER_S, rel=0.06)
    assert percent == pytest.approx(100 * num_gb / NIC_GB_PER_S / 3.3, rel=0.06)


@pytest.mark.parametrize(
    ("model", "num_billion"),
    [("Qwen3-0.6B", 0.596), ("Qwen3-8B", 8.19), ("Qwen3-14B", 14.77), ("Qwen3-30B-A3B", 30.53)],
)
def test_bytes_of_a_version_follow_from_the_weights(model: str, num_billion: float) -> None:
    num_gb, fast_s, slow_s, changed_gb = row(model)
    assert num_gb == pytest.approx(2 * num_billion, rel=0.06)
    assert fast_s == pytest.approx(num_gb / NIC_GB_PER_S, rel=0.2)
    assert slow_s == pytest.approx(num_gb / 12.5, rel=0.06)
    assert changed_gb == pytest.approx(0.023 * num_gb, rel=0.1)
