"""Laws of routing replay with sharded weights: two ranks use the records as one process does."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.conformance.sharded import _meet
from common.config.compute import Layout, Precision
from common.config.learning import LearnerSection
from learner.policy.forward import Networks, Passes
from learner.policy.loading import fill
from learner.policy.model import load_policy, whole
from tests.learner.experts import save_experts
from tests.learner.policy.experts.test_routing import block_of, draw_choices, sequences_of

pytestmark = pytest.mark.slow
LENGTHS = (24, 17)
STOP_S = 60.0


def score(path: Path, layout: Layout, mesh: DeviceMesh | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores with records and the gradient of the first router."""
    num_ranks = 1 if mesh is None else mesh.size()
    is_sharded = mesh is not None
    cfg = LearnerSection(device="cpu", precision=Precision.FP32, layout=layout, num_ranks=num_ranks)
    model: Any = load_policy(
        str(path), device="cpu", gradient_checkpointing=True, is_skeleton=is_sharded
    )
    networks = Networks(policy=model)
    passes = Passes(
        cfg, networks, temperature=1.0, engine_dtype="float32", replays_routing=True, mesh=mesh
    )
    if is_sharded:
        fill(model, str(path))
    passes.check_start(may_pad=False)
    assert passes.routing is not None
    recorded = [
        (draw_choices(length, passes.routing, seed=seed), np.arange(length) % 5 > 0)
        for seed, length in enumerate(LENGTHS)
    ]
    tokens = block_of(passes, sequences_of(*LENGTHS), recorded)
    found = passes.score(tokens).logprobs
    found.sum().backward()
    return found.detach(), whole(model.model.layers[0].mlp.gate.weight.grad).clone() / num_ranks


def second_rank(folder: str, path: str, layout: Layout, started: Any) -> None:
    torch.set_num_threads(1)
    started.set()
    score(Path(path), layout, _meet(folder, 1))


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
def test_two_ranks_replay_the_recorded_experts(tmp_path: Path, layout: Layout) -> None:
    path = tmp_path / "model"
    save_experts(path, "qwen3_moe")
    expected, gradient = score(path, layout, None)
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    given = (str(tmp_path), str(path), layout, started)
    other = context.Process(target=second_rank, args=given)
    other.start()
    assert started.wait(STOP_S), "the second process imports torch"
    try:
        found, ours = score(path, layout, _meet(str(tmp_path), 0))
    finally:
        other.join(STOP_S)
        other.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(ours, gradient, atol=1e-5, rtol=1e-4)
    assert other.exitcode == 0
