"""Device check of divided experts: gradients, bytes and time of tokens against gathered weights."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from benchmarks.learner.batch import BatchShape, make_batch
from benchmarks.learner.checks.bench import DeviceBench
from benchmarks.learner.step import alternate, clock_of
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, Precision
from common.host.loopback import loopback
from common.weights.rendezvous import interface_of
from learner.policy.forward import Networks
from learner.policy.model import whole
from learner.training.rank_processes import expert_mesh
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings

NUM_RANKS = 2
TIMEOUT = timedelta(seconds=90)
GATHERED = "gathered experts"
EXCHANGED = "divided experts"
MAX_DIFFERENCE = {"cpu": 1e-5, "cuda": 1e-4}
SMALL = {"hidden_size": 64, "moe_intermediate_size": 96, "num_hidden_layers": 2}
LARGE = {"hidden_size": 1_024, "moe_intermediate_size": 768, "num_hidden_layers": 8}
SHORT = BatchShape(num_groups=1, group_size=4, max_turns=2, observation_tokens=8, action_tokens=8)
LONG = BatchShape(num_groups=1, group_size=8, max_turns=8, observation_tokens=64, action_tokens=64)


class MeasuredPass(NamedTuple):
    """The results of one rank, for gathered or for divided experts."""

    gradient: torch.Tensor  # [weight] float64, of fp32 passes over all ranks' samples
    num_bytes: int  # Bytes that this rank's collectives moved in the pass.
    step_s: float  # The best time of a pass in the device's own precision.


class CommunicatedBytes(TorchDispatchMode):
    """Counts the bytes of collectives: those that a rank receives from others, or sends to them."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_bytes = 0.0
        self._frac = (num_ranks - 1) / num_ranks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        match func.name().split("::")[-1].split(".")[0]:
            case "_allgather_base_" | "alltoall_base_":
                self.num_bytes += self._frac * args[0].nbytes
            case "_reduce_scatter_base_":
                self.num_bytes += self._frac * args[1].nbytes
        return func(*args, **(kwargs or {}))


def make_mixture(device: torch.device, sizes: dict[str, int]) -> PreTrainedModel:
    """Return a Qwen3-MoE of random weights with 16 experts, 4 of them chosen."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **cast(Any, {"head_dim": 32, **sizes}),
    )
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.Module.to(model, device)
    return model.train()


def check_experts(bench: DeviceBench) -> None:
    """Compare divided experts with gathered ones, on two devices or on two ranks of the CPU.

    One GPU has a group of one rank, which sends tokens to itself: the kernels and the gradient are
    those of several ranks, the bytes are not.
    """
    num_ranks = NUM_RANKS
    if bench.is_cuda and torch.cuda.device_count() < NUM_RANKS:
        num_ranks = 1
        bench.suite.note("divided experts on two GPUs", "left out: this machine has one GPU")
    with tempfile.TemporaryDirectory(prefix="experts-") as folder:
        arguments = (num_ranks, bench.device.type, folder)
        cast(Any, mp).spawn(_be_rank, args=arguments, nprocs=num_ranks)
        results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(num_ranks)]
    most = MAX_DIFFERENCE[bench.device.type]
    gathered, divided = (MeasuredPass(*results[0][name]) for name in (GATHERED, EXCHANGED))
    apart = float((divided.gradient - gathered.gradient).norm() / gathered.gradient.norm())
    title = f"divided experts, {num_ranks} ranks: |gradient - gathered one| / |gradient|"
    bench.suite.at_most(title, apart, "", most)
    bench.suite.compare(
        f"divided experts, {num_ranks} ranks: a pass",
        divided.step_s,
        gathered.step_s,
        "s",
        against=GATHERED,
    )
    if num_ranks > 1:
        for name, found in ((GATHERED, gathered), (EXCHANGED, divided)):
            bench.suite.figure(f"{name}: bytes of a rank in a pass", found.num_bytes / 1e6, "MB")


def _be_rank(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    """Compute both kinds of passes as one rank, and write their results."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(loopback())
    is_cuda = device_type == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    device = torch.device(device_type, rank) if is_cuda else torch.device("cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=cast(Any, dist).FileStore(f"{folder}/store", num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=TIMEOUT,
    )
    mesh = init_device_mesh(device_type, (num_ranks,), mesh_dim_names=("shard",))
    divided = expert_mesh(num_ranks, num_ranks, device_type)
    if num_ranks == 1:
        divided = init_device_mesh(device_type, (1,), mesh_dim_names=("expert",))
    results: dict[str, MeasuredPass] = {}
    for name, experts in ((GATHERED, None), (EXCHANGED, divided)):
        results[name] = _measure(mesh, experts, device)
    torch.save({name: tuple(each) for name, each in results.items()}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _measure(mesh: DeviceMesh, experts: DeviceMesh | None, device: torch.device) -> MeasuredPass:
    """Return the gradient of a pass, its bytes, and its time."""
    is_cuda = device.type == "cuda"
    run, network = _passes(mesh, experts, device, Precision.FP32)
    with CommunicatedBytes(mesh.size()) as counted:
        run()
    gradients = [whole(each.grad) for each in network.parameters() if each.grad is not None]
    gradient = torch.cat([each.flatten().cpu().double() for each in gradients])
    if is_cuda:
        run, network = _passes(mesh, experts, device, Precision.BF16)
    seconds = alternate({"": run}, num_rounds=3, clock=clock_of(device))[""]
    return MeasuredPass(gradient, int(counted.num_bytes), min(seconds))


def _passes(
    mesh: DeviceMesh, experts: DeviceMesh | None, device: torch.device, precision: Precision
) -> tuple[Callable[[], object], PreTrainedModel]:
    """Return a function that computes the gradient of one microbatch, and the network."""
    is_cuda = device.type == "cuda"
    network = make_mixture(device, LARGE if is_cuda else SMALL)
    learner = LearnerSection(
        device=device.type,
        precision=precision,
        num_ranks=mesh.size(),
        expert_ranks=1 if experts is None else mesh.size(),
    )
    settings = TrainerSettings(learner=learner, algorithm=AlgorithmSection(), num_steps=10)
    samples = make_batch(LONG if is_cuda else SHORT, vocab_size=512, seed=0)
    ranks = Ranks(mesh, expert_mesh=experts)
    gradients = Gradients(settings, Networks(policy=network), ranks)

    def run() -> None:
        network.zero_grad()
        gradients.accumulate(gradients.prepare(samples, version=0), range(len(samples)))

    return run, network
