"""Checks of training on one device: steps, memory, packed rows, shards of one rank, adapters."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from benchmarks.learner.batch import make_batch, make_random_model, num_weights
from benchmarks.learner.checks.bench import DeviceBench, PackedCase, canary_delta
from benchmarks.learner.memory import measure_scoring, peak_bytes
from benchmarks.learner.step import BARE, MAX_RATIO, alternate, clock_of, measure_step, measure_ways
from benchmarks.learner.suite import add_peaks, add_step_cost, add_ways
from common.config.algorithm import AlgorithmSection
from common.config.learner import Activations, Attention, Layout, LearnerSection, Offload, Precision
from learner.batch.batching import Sample, TokenBatch, collate_tokens
from learner.policy.activation_plan import activation_bytes, choose_layers, logit_bytes, row_of
from learner.policy.forward import Networks, Passes
from learner.policy.merging import merged_tensors
from learner.policy.model import parameter_count, vocabulary_size, whole
from learner.policy.model_shape import read_shape
from learner.training.optimizer import LossScale
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings
from learner.training.throughput import step_flops
from learner.training.trainer import Trainer

MIN_STEP_TOKENS_PER_S = 1_000.0
MIN_COMPILED_GAIN = 1.05  # From this gain on, compilation is worth its time at the start.
STEP_ROUNDS = 5
MAX_STEP_RATIO = 1.05  # A whole step may take this many times a bare one on a GPU.
SHARDED = "FSDP2 on one rank"
NUM_PRODUCTS = 20
# In fp32; on CUDA the order of additions in attention's backward pass varies.
MAX_SHARD_DIFFERENCE = {"cpu": 1e-6, "cuda": 1e-4}
# Largest error of the gradient in fp16 over that in bf16, whose rounding is eight times as coarse.
MAX_FP16_GRADIENT = 0.5
MAX_FP16_CANARY = LearnerSection().max_canary_delta / 4
MAX_OVERFLOWS = 8  # The scale falls from 65536 to 256.
GROUP_TIMEOUT = timedelta(seconds=120)
# Bytes per trained weight (fp32, its moments, a copy) and per frozen weight; bytes of working
# memory.
TRAIN_BYTES = 18
FROZEN_BYTES = 2
WORK_BYTES = 6 << 30
# Bounds of measured over planned memory of a long row.
MIN_OF_PLAN = 0.9
MAX_OF_PLAN = 1.1
MAX_ROW_TURN = 0.02  # Chunks of a row round in bf16 otherwise than the whole row.
MAX_OFFLOAD_RATIO = 1.05


def check_step(bench: DeviceBench) -> None:
    """Compare a whole training step with a bare one."""
    sizes = bench.sizes
    model = bench.model()
    size = f"{parameter_count(model) / 1e6:.0f}M weights"
    name = "grpo, token"
    cost = measure_step(
        sizes.learner,
        {name: AlgorithmSection()},
        model,
        sizes.step_shape,
        num_rounds=STEP_ROUNDS,
        engine_dtype="bfloat16",
    )
    title = f"step of {cost.num_tokens} tokens, {size}, bf16 autocast"
    most = MAX_STEP_RATIO if bench.is_cuda else MAX_RATIO
    add_step_cost(bench.suite, cost, of=title, most=most)
    bound = MIN_STEP_TOKENS_PER_S if bench.is_cuda else 0.0
    bench.suite.at_least(f"step: {name}", cost.tokens_per_s(name), "tokens/s", bound)


def check_compiled(bench: DeviceBench) -> None:
    """Compare compiled layers with plain ones. The gain decides the default of learner.compile."""
    sizes = bench.sizes
    ways = {BARE: sizes.learner, "compiled": replace(sizes.learner, compile=True)}
    cost = measure_ways(
        ways, bench.model(), sizes.shape, num_rounds=sizes.num_rounds, engine_dtype="bfloat16"
    )
    add_ways(bench.suite, cost, against="plain")
    gain = 1.0 / cost.ratio("compiled")
    advice = "true" if gain >= MIN_COMPILED_GAIN else "false"
    bench.suite.title(
        f"learner.compile: {advice} is better here. Compiled layers are {gain:.2f} x as fast, and"
        f" pay from {MIN_COMPILED_GAIN:g} on."
    )


def check_memory(bench: DeviceBench) -> None:
    """Compare the peak memory of scoring in chunks with that of one log-softmax."""
    sizes = bench.sizes
    num_tokens = sizes.memory_sequences * sizes.memory_seq_tokens
    defaults = LearnerSection()
    num_chunks = defaults.max_tokens_per_microbatch // defaults.logprob_chunk_tokens
    peaks = measure_scoring(
        bench.model(num_hidden_layers=2),
        num_sequences=sizes.memory_sequences,
        num_seq_tokens=sizes.memory_seq_tokens,
        chunk_tokens=num_tokens // num_chunks,
    )
    vocabulary = f"vocabulary of {sizes.model['vocab_size']}"
    of = f"memory: {vocabulary}, {num_tokens} tokens in {num_chunks} chunks"
    add_peaks(bench.suite, peaks, of=of)


def check_packed(bench: DeviceBench, *, number: int) -> None:
    """Compare the arithmetic rate of one case's training steps with bare matrix products in bf16.

    Args:
        number: index of the case in the sizes.
    """
    case = bench.sizes.packed[number]
    needed = num_weights(case.model) * (FROZEN_BYTES if case.lora_rank else TRAIN_BYTES)
    if bench.is_cuda:
        capacity = torch.cuda.get_device_properties(bench.device).total_memory
        if needed + WORK_BYTES > capacity:
            sizes = f"{(needed + WORK_BYTES) / 1e9:.0f} GB, the device has {capacity / 1e9:.0f} GB"
            bench.suite.note(case.name, f"left out: needs about {sizes}")
            return
    rate = _matrix_rate(bench.device, torch.bfloat16, bench.sizes.matrix_size) / 1e12
    _packed_step(bench, case, rate)


def _packed_step(bench: DeviceBench, case: PackedCase, rate: float) -> None:
    """Measure a packed step: its rate beside that of matrix products, and its memory."""
    model = bench.shaped(case.model, lora_rank=case.lora_rank)
    samples = make_batch(case.shape, vocab_size=vocabulary_size(model), seed=0)
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    cfg = LearnerSection(
        device=bench.device.type,
        lr=1e-9,
        layout=Layout.PACKED,
        max_tokens_per_microbatch=sum(lengths),
        activations=Activations.RECOMPUTE,
    )
    step = _step_of(bench.trainer(model, cfg), samples)
    peak = peak_bytes(step, bench.device) if bench.is_cuda else 0
    best_s = min(alternate({"": step}, num_rounds=3, clock=clock_of(bench.device))[""])
    flops = step_flops(model, lengths, sum(sample.num_sampled_tokens for sample in samples))
    bench.suite.compare(
        f"{case.name}, {sum(lengths)} tokens packed",
        flops / best_s / 1e12,
        rate,
        "TFLOP/s",
        against="bf16 matrix product",
        at_least=case.min_rate_frac if bench.is_cuda else None,
        note=f"{sum(lengths) / best_s:.0f} tokens/s, {parameter_count(model) / 1e9:.2f}B weights, "
        f"{best_s:.2f} s, {peak / 1e9:.0f} GB above the weights",
    )


def _matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of a product of two [size, size] matrices, the best of 3."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(left, right)

    seconds = alternate({"": multiply}, num_rounds=3, clock=clock_of(device))[""]
    return NUM_PRODUCTS * 2 * size**3 / min(seconds)


def check_shards(bench: DeviceBench) -> None:
    """Compare one FSDP2 rank with none: its gradient in fp32, and the time of a step.

    A second comparison stores and updates weights, gradients and moments in the host's memory.
    """
    model = bench.model()
    samples = bench.samples(model)
    found: dict[str, torch.Tensor] = {}
    steps: dict[str, Callable[[], object]] = {}
    with _group_of_one(bench.device) as one:
        for name, ranks, offload in (
            ("plain", Ranks(), Offload.NONE),
            (SHARDED, one, Offload.NONE),
            (f"{SHARDED}, offloaded", one, Offload.OPTIMIZER),
        ):
            settings = replace(bench.sizes.learner, warmup_steps=0, offload=offload)
            exact = _settings(replace(settings, precision=Precision.FP32))
            found[name] = _gradient(exact, copy.deepcopy(model), ranks, samples)
            networks = Networks(policy=copy.deepcopy(model))
            steps[name] = _step_of(Trainer(_settings(settings), networks, ranks=ranks), samples)
        seconds = alternate(steps, num_rounds=3, clock=clock_of(bench.device))
    plain = found.pop("plain")
    plain_s = min(seconds["plain"])
    for name, gradient in found.items():
        apart = ((gradient - plain).norm() / plain.norm()).item()
        title = f"{name}: |gradient - plain one| / |gradient|"
        bench.suite.at_most(title, apart, "", MAX_SHARD_DIFFERENCE[bench.device.type])
        took_s = min(seconds[name])
        bench.suite.compare(f"{name}: a step", took_s, plain_s, "s", against="without shards")


def check_fp16(bench: DeviceBench) -> None:
    """Compare the gradient of a step in fp16 with those of fp32 and bf16, and count overflows."""
    model = bench.model()
    samples = bench.samples(model)
    learner = replace(bench.sizes.learner, warmup_steps=0)
    found: dict[Precision, torch.Tensor] = {}
    for precision, scale in (
        (Precision.FP32, 1.0),
        (Precision.BF16, 1.0),
        (Precision.FP16, LossScale.FIRST),
    ):
        settings = _settings(replace(learner, precision=precision))
        made = _gradient(settings, copy.deepcopy(model), Ranks(), samples, scale=scale)
        found[precision] = made / scale
    exact = found[Precision.FP32]
    apart = {each: float((found[each] - exact).norm() / exact.norm()) for each in found}
    bench.suite.compare(
        "fp16: |gradient - that of fp32| / |gradient|",
        apart[Precision.FP16],
        apart[Precision.BF16],
        "",
        against="bf16",
        at_most=MAX_FP16_GRADIENT,
    )
    settings = _settings(replace(learner, precision=Precision.FP16))
    trainer = Trainer(replace(settings, engine_dtype="float16"), Networks(policy=model))
    num_overflows = 0
    while num_overflows <= MAX_OVERFLOWS and _overflows(trainer, samples):
        num_overflows += 1
    title = "fp16: overflows before the first update"
    bench.suite.at_most(title, num_overflows, "", MAX_OVERFLOWS)
    sequences = bench.canaries(model)
    scores = trainer.score(sequences)
    nn.Module.to(model, torch.float16)  # Changes the trainer's own model in place.
    title = "fp16: canary of fp32 masters under autocast against fp16 weights"
    bench.suite.at_most(title, canary_delta(scores, model, sequences), "nats", MAX_FP16_CANARY)


def _overflows(trainer: Trainer, samples: list[Sample]) -> bool:
    """Make a step, and return whether it has no update."""
    step = trainer.train_on(samples, version=1, must_train=True)
    return not step.metrics["train/num_updates"]


def _step_of(trainer: Trainer, samples: list[Sample]) -> Callable[[], object]:
    """Return a function that makes one training step."""
    return lambda: trainer.train_on(samples, version=1, must_train=True)


def _settings(learner: LearnerSection) -> TrainerSettings:
    """Return the settings of a trainer."""
    return TrainerSettings(learner=learner, algorithm=AlgorithmSection(), num_steps=1_000)


def _gradient(
    settings: TrainerSettings,
    model: PreTrainedModel,
    ranks: Ranks,
    samples: list[Sample],
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return the gradient of one pass over the samples, times `scale`."""
    gradients = Gradients(settings, Networks(policy=model), ranks)
    batch = gradients.prepare(samples, version=0)
    gradients.accumulate(batch, range(len(samples)), scale=scale)
    found = [whole(p.grad) for p in model.parameters() if p.grad is not None]
    return torch.cat([each.flatten().cpu() for each in found]).double()


@contextmanager
def _group_of_one(device: torch.device) -> Iterator[Ranks]:
    """Make a process group of this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    try:
        yield Ranks(init_device_mesh(device.type, (1,)))
    finally:
        dist.destroy_process_group()


def check_adapters(bench: DeviceBench) -> None:
    """Train adapters, merge them into bf16 weights, and compare both models' scores."""
    model = bench.shaped(bench.sizes.model, lora_rank=8)
    trainer = bench.trainer(model, replace(bench.sizes.learner, warmup_steps=0))
    samples = bench.samples(model)
    canary = [sample.trajectory.token_ids[:64].tolist() for sample in samples[:4]]
    fresh = np.concatenate(trainer.score(canary))
    trainer.train_on(samples, version=0, must_train=True)
    trained = trainer.score(canary)
    merged = make_random_model(bench.sizes.model, device=bench.device, dtype=torch.bfloat16)
    merged.load_state_dict(dict(merged_tensors(model, model.state_dict())))
    moved = float(np.abs(np.concatenate(trained) - fresh).max())
    bench.suite.at_least("adapters: a step changes the scores", moved, "nats", 1e-9)
    delta = canary_delta(trained, merged, canary)
    name = "adapters: merged in bf16 against trained beside the base"
    bench.suite.at_most(name, delta, "nats", bench.sizes.learner.max_canary_delta)


def check_long_row(bench: DeviceBench) -> None:
    """Compare the memory of one long row with the plan, and the time of offloaded inputs."""
    num_tokens = bench.sizes.long_row_tokens
    took_s: dict[Activations, float] = {}
    gradients: dict[Activations, torch.Tensor] = {}
    for mode in (Activations.KEEP, Activations.RECOMPUTE, Activations.OFFLOAD):
        torch.manual_seed(0)
        model = bench.model()
        cfg = replace(
            bench.sizes.learner,
            layout=Layout.PACKED,
            attention=Attention.FUSED,
            precision=Precision.BF16,
            activations=mode,
            mlp_chunk_tokens=num_tokens // 8,
            max_tokens_per_microbatch=num_tokens,
        )
        passes = Passes(cfg, Networks(policy=model), temperature=1.0, engine_dtype="bfloat16")
        ids = np.arange(num_tokens) * 7919 % vocabulary_size(model)
        marks = [np.arange(num_tokens) > 0]
        tokens = collate_tokens([ids], marks, device=bench.device, is_packed=True)

        def run(passes: Passes = passes, tokens: TokenBatch = tokens) -> None:
            (-passes.score(tokens).logprobs.mean()).backward()

        run()  # Compiles kernels and allocates the gradients.
        model.zero_grad(set_to_none=False)
        measured = peak_bytes(run, bench.device)
        parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients[mode] = torch.cat(parts).float()
        clock = clock_of(bench.device)
        began = clock()
        run()
        took_s[mode] = clock() - began
        planned = _planned_row(model, cfg, is_cuda=bench.is_cuda)
        name = f"row of {num_tokens:,} tokens, {mode.value}: memory over its plan"
        if bench.is_cuda:
            bench.suite.at_least(name, measured / planned, "", MIN_OF_PLAN)
            bench.suite.at_most(name, measured / planned, "", MAX_OF_PLAN)
        else:  # A plan of long rows leaves out what only short ones show.
            bench.suite.figure(name, measured / planned, "")
    whole_gradient = gradients[Activations.KEEP]
    for mode in (Activations.RECOMPUTE, Activations.OFFLOAD):
        turned = float((gradients[mode] - whole_gradient).norm() / whole_gradient.norm())
        bench.suite.at_most(f"long row, {mode.value}: gradient", turned, "", MAX_ROW_TURN)
    ratio = took_s[Activations.OFFLOAD] / took_s[Activations.RECOMPUTE]
    name = "long row: time with offloaded inputs over recomputation"
    if bench.is_cuda:
        bench.suite.at_most(name, ratio, "", MAX_OFFLOAD_RATIO)
    else:
        bench.suite.figure(name, ratio, "")


def _planned_row(model: PreTrainedModel, cfg: LearnerSection, *, is_cuda: bool) -> int:
    """Return the planned bytes of a row's activations and logits."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        shape = read_shape(Path(folder))
    row = row_of(cfg, 0, is_cuda=is_cuda, is_16_bit=True)
    stored = choose_layers(cfg, shape, row, num_layers=shape.layers)
    peak = activation_bytes(shape, row, stored, mlp_chunk_tokens=cfg.mlp_chunk_tokens)
    chunk_tokens = cfg.logprob_chunk_tokens
    logits = logit_bytes(row, peak, vocab=shape.vocab, chunk_tokens=chunk_tokens, width=row.width)
    return peak.num_bytes + logits + 2 * parameter_count(model)  # And bf16 copies of the weights.
