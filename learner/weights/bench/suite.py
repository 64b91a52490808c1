"""The suite that measures versions on their way: beside the raw collective, a step, an engine."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor

from common.config.learning import AlgorithmSection, LearnerSection, Precision
from common.config.load import load_config
from common.report.bench_table import BenchTable
from common.repository import ROOT
from common.wire.collective import CPU, BroadcastGroup, Place, open_store
from common.wire.transfer.buckets import NUM_SLOTS, Cut, send_buckets
from common.wire.weight_group import lower_priority
from learner.bench.batch import MODELS, QUICKSTART, make_batch, make_random_model
from learner.bench.engine import EngineRun, measure_engine
from learner.bench.step import make_trainer
from learner.weights.bench.receiver import HOST, TIMEOUT_S, Receiver
from learner.weights.gate import Gate
from learner.weights.source import LiveWeights

SAMPLE_S = 0.005  # between looks at memory
MIN_BROADCAST_FRAC, MAX_BUCKETS, MIN_STEP_FRAC, MAX_PAUSE_FRAC = 0.8, 2.0, 0.95, 0.35
DEEP = {  # with the vocabulary of "larger" about 1 GB in bf16
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 9},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is sent."""

    num_bytes: int = 1_000_000_000  # in bf16
    bucket_bytes: int = 256 << 20
    num_receivers: int = 4
    num_rounds: int = 3


def run_suite(table: BenchTable) -> None:
    """Measure the weight plane on the CPUs of this machine in three minutes."""
    torch.set_num_threads(1)
    table.attempt("broadcast", lambda: check_broadcast(table, Size()))
    table.attempt("step", lambda: check_step(table, num_rounds=6))
    table.attempt("pause", lambda: check_pause(table, DEEP))


@contextmanager
def receivers(plan: list[str], *, num: int, cut: Cut) -> Iterator[BroadcastGroup]:
    """Yield rank 0 of a group with `num` processes, which receive what the plan says."""
    store = open_store(HOST, 0, is_server=True, timeout_s=TIMEOUT_S)
    told = [
        Receiver(
            port=store.port,
            rank=1 + index,
            world_size=1 + num,
            num_bytes=cut.total_bytes,
            bucket_bytes=cut.bucket_bytes,
            plan=plan,
        )
        for index in range(num)
    ]
    command = [sys.executable, "-m", "learner.weights.bench.receiver"]
    processes = [subprocess.Popen([*command, json.dumps(asdict(each))], cwd=ROOT) for each in told]
    try:
        group = BroadcastGroup(store, Place(0, 1 + num, "gloo", TIMEOUT_S, HOST), epoch=1)
        yield group
        codes = [process.wait(TIMEOUT_S) for process in processes]
        group.close()
        if any(codes):
            raise RuntimeError(f"receivers ended with {codes}: what came is not what was sent")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_broadcast(table: BenchTable, size: Size) -> None:
    """Send live fp32 weights as bf16, checked, and the same bytes by one broadcast, in turn."""
    weights = torch.randn(size.num_bytes // 2)
    source = LiveWeights([("weights", weights)], torch.bfloat16)
    cut = Cut(source.total_bytes, size.bucket_bytes)
    plan = ["ours", "raw"] * (size.num_rounds + 1)  # memory is touched in the first round
    took_s: dict[str, list[float]] = {"raw": [], "ours": []}
    slots: list[Tensor] = []
    raw = torch.zeros(cut.total_bytes, dtype=torch.uint8)
    peak_bytes = 0
    with receivers(plan, num=size.num_receivers, cut=cut) as group:
        for kind in plan:
            group.barrier()
            with _Peak() as peak:
                started = time.perf_counter()
                if kind == "raw":
                    group.broadcast(raw)
                else:
                    slots = slots or [
                        torch.zeros(cut.slot_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)
                    ]
                    send_buckets(group, cut, slots, source.fill)
            group.barrier()  # all have checked what came
            took_s[kind].append(time.perf_counter() - started)
            peak_bytes = max(peak_bytes, peak.grown_bytes) if kind == "ours" else peak_bytes
    speeds = {kind: cut.total_bytes / 1e9 / median(each[1:]) for kind, each in took_s.items()}
    table.compare(
        f"weights: {cut.total_bytes / 1e9:.2f} GB to {size.num_receivers}, cast and checked",
        *(speeds["ours"], speeds["raw"]),
        "GB/s",
        against="raw collective",
        at_least=MIN_BROADCAST_FRAC,
        note=f"of {size.num_rounds} rounds in turn",
    )
    table.compare(
        "weights: memory of the sender beside what it has",
        *(peak_bytes / 1e6, cut.slot_bytes / 1e6),
        "MB",
        against="a bucket",
        at_most=MAX_BUCKETS + 0.1,  # what the process itself breathes
    )


class _Peak:
    """The most memory that this process has grown by while something ran."""

    def __enter__(self) -> "_Peak":
        self._process, self._is_over = psutil.Process(), threading.Event()
        self._before = self._process.memory_info().rss
        self.grown_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            grown = self._process.memory_info().rss - self._before
            self.grown_bytes = max(self.grown_bytes, grown)

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def check_step(table: BenchTable, *, num_rounds: int) -> None:
    """Time training steps with and without a version on its way to one receiver, in turn."""
    model = make_random_model(MODELS["larger"], device=CPU)
    gate = Gate(timeout_s=TIMEOUT_S)
    cfg = LearnerSection(precision=Precision.FP32)
    trainer = make_trainer(
        cfg, AlgorithmSection(), model, engine_dtype="bfloat16", before_update=gate.close
    )
    samples = make_batch(QUICKSTART, vocab_size=model.config.vocab_size, seed=table.seed)
    source = trainer.live_weights()
    cut = Cut(source.total_bytes, max(16, source.total_bytes // 64 * 16))
    slots = [torch.zeros(cut.slot_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    took_s: dict[bool, list[float]] = {False: [], True: []}
    with receivers(["ours"] * (num_rounds + 1), num=1, cut=cut) as group:

        def send() -> None:
            lower_priority()
            group.barrier()
            send_buckets(group, cut, slots, source.fill)
            gate.leave()
            group.barrier()

        for number in range(2 * num_rounds + 2):
            travels = number % 2 == 1
            sending = threading.Thread(target=send, daemon=True)
            started = time.perf_counter()
            if travels:
                gate.open()
                gate.enter()
                sending.start()
            trainer.train_on(samples, version=number)
            took_s[travels].append(time.perf_counter() - started)
            if travels:
                sending.join(TIMEOUT_S)
    alone, beside = (median(took_s[travels][1:]) for travels in (False, True))
    table.compare(
        f"step: while {cut.total_bytes / 1e6:.0f} MB travel",
        *(1.0 / beside, 1.0 / alone),
        "steps/s",
        against="without",
        at_least=MIN_STEP_FRAC,
    )


def check_pause(table: BenchTable, model_settings: dict[str, int]) -> None:
    """Bring a version to a vLLM engine on a CPU: how long it travels, how long nobody samples."""
    cfg = load_config("quickstart", [], root=ROOT)
    model = make_random_model({**MODELS["larger"], **model_settings}, device=CPU)
    learner = LearnerSection(precision=Precision.FP32)
    trainer = make_trainer(learner, AlgorithmSection(), model, engine_dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_engine(
            trainer,
            model,
            EngineRun(device="", dtype="bfloat16", is_on_host=True, num_prompts=4, max_tokens=16),
            tokenizer_path=str(ROOT / cfg.model.path),
            canary=[[1, 2, 3, 4]],
            folder=Path(folder),
            environ={},
        )
    size_gb = figures.num_bytes / 1e9
    table.compare(
        f"engine: pause of a version of {size_gb:.2f} GB",
        *(figures.pause_s, figures.transfer_s),
        "s",
        against="its transfer",
        at_most=MAX_PAUSE_FRAC,
        note=f"per GB {figures.pause_s / size_gb:.2f} s and {figures.transfer_s / size_gb:.2f} s, "
        f"offer to loaded {figures.publish_s / size_gb:.2f} s",
    )
