"""Laws of `learner.offload`: the same training, with all that is kept in the host's memory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from common.config.learner import Moments, Offload
from common.config.run_config import RunConfig
from learner.training.ranks import Ranks
from learner.training.state import StateWriter, _stored
from tests.learner.builders import make_samples, tensors_of
from tests.learner.training.test_moments import local_values, make, make_cfg, save
from tests.learner.training.test_rank_workers import SEQUENCES, ranks_of
from tests.marks import long_for


def offloaded(cfg: RunConfig) -> RunConfig:
    learner = replace(cfg.learner, offload=Offload.OPTIMIZER, device="auto")
    return replace(cfg, learner=learner)


def train(trainer: Any, *steps: int) -> dict[str, torch.Tensor]:
    for step in steps:
        trainer.train_on(make_samples(seed=step), version=step)
    return local_values(trainer)


def policies_of(network: torch.nn.Module) -> set[type]:
    """Return how each sharded part of a network is kept."""
    states: list[Any] = [
        module._get_fsdp_state() for module in network.modules() if isinstance(module, FSDPModule)
    ]
    groups = [
        group
        for state in states
        for group in (
            state._fsdp_param_groups
            if hasattr(state, "_fsdp_param_groups")
            else [state._fsdp_param_group]  # torch 2.11
        )
    ]
    return {type(group.offload_policy) for group in groups if group is not None}


@pytest.mark.parametrize("case", long_for(["plain", "lora", "critic"], ["plain", "lora"]))
def test_offloaded_run_trains_publishes_and_resumes_like_a_plain_one(
    case: str, tmp_path: Path
) -> None:
    cfg = make_cfg(tmp_path, case)
    cfg = replace(cfg, learner=replace(cfg.learner, moments=Moments.FP32))
    plain = make(cfg)
    expected = train(plain, 0, 1)
    with ranks_of(offloaded(cfg)) as (trainer, _):
        result = train(trainer, 0, 1)
        networks = trainer._gradients._networks
        kept = [networks.policy, networks.critic, networks.reference]
        assert [policies_of(each) for each in kept if each] == [{CPUOffloadPolicy}] * (
            3 if case == "critic" else 1
        )
        folder = save(trainer, tmp_path / "checkpoints", cfg, version=2)
        published = tensors_of(trainer.live_weights())
        scores = trainer.score(SEQUENCES)
        onward = train(trainer, 2)
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(result[name].float(), value.float(), atol=1e-6), name
    for name, value in tensors_of(plain.live_weights()).items():
        assert (published[name] - value).abs().max() < 1e-6
    for ours, theirs in zip(scores, plain.score(SEQUENCES), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    again = make(cfg, folder)
    resumed = train(again, 2)
    with ranks_of(offloaded(cfg), folder) as (trainer, _):
        assert all(torch.equal(onward[n], v) for n, v in train(trainer, 2).items())
    for name, value in resumed.items():
        assert torch.allclose(onward[name].float(), value.float(), atol=1e-6), name


def test_offloaded_parts_stay_in_host_memory_on_a_gpu_mesh() -> None:
    """As on a machine with GPUs, of which none is asked here."""
    from torchao.optim.subclass_8bit import OptimState8bit

    distributed: Any = dist
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cuda", torch.tensor([0, 1]))
        kept: Any = OptimState8bit.zeros((16, 256), signed=True, block_size=256, device="cpu")
        meta = TensorMeta(torch.Size((32, 256)), (256, 1), torch.float32)
        moment = DTensor(kept, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
        parts = dict(_stored("moment", moment))
        assert parts["moment.codes"].shape == (32, 256)
        assert parts["moment.scale"].shape == (32, 1)
        for name, part in parts.items():
            assert isinstance(part, DTensor)
            own = getattr(kept, name.removeprefix("moment."))
            assert part.to_local().data_ptr() == own.data_ptr()  # Reads fill the kept tensor.
        writer = StateWriter(Ranks())
        writer.copy(parts)
        assert {each.device.type for each in writer.copies.values()} == {"cpu"}
    finally:
        distributed.destroy_process_group()
