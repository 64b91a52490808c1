"""Device checks of an engine: the gain of CUDA graphs, and the memory that its sleep returns."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.learner.batch import make_random_model
from benchmarks.learner.checks.bench import DeviceBench
from benchmarks.learner.checks.training import MAX_FP16_CANARY
from benchmarks.learner.checks.weights import TOKENIZER, run_engine
from common.host.child_process import ChildProcess
from common.repository import ROOT

MIN_GRAPH_GAIN = 1.1
MIN_RETURNED_FRAC = 0.9
MAX_WAKE_S = 5.0
SLEEP_TIMEOUT_S = 150.0
SLEEP_CHILD = "benchmarks.actor.sleep"


def check_graphs(bench: DeviceBench) -> None:
    """Compare the sampling rate of an engine with CUDA graphs with that of one without.

    Both engines and the trainer compute in fp16. The check `engine` has the canary in bf16.
    """
    suite = bench.suite
    if not bench.is_cuda:
        suite.note("engine with CUDA graphs", "left out: a CPU has none")
        return
    eager = run_engine(bench, bench.sizes.model, enforce_eager="true", dtype="float16")
    suite.figure("engine without CUDA graphs: start", eager.start_s, "s")
    graphs = run_engine(bench, bench.sizes.model, enforce_eager="false", dtype="float16")
    suite.figure("engine with CUDA graphs: start", graphs.start_s, "s")
    suite.compare(
        "engine with CUDA graphs: sampling",
        graphs.tokens_per_s,
        eager.tokens_per_s,
        "tokens/s",
        against="without them",
        at_least=MIN_GRAPH_GAIN,
    )
    title = "engine in fp16: canary against the trainer in fp16"
    largest = max(eager.canary_delta, graphs.canary_delta)
    suite.at_most(title, largest, "nats", MAX_FP16_CANARY)


def check_sleep(bench: DeviceBench) -> None:
    """Measure how much of its GPU memory a sleeping engine returns, and its wake-up."""
    suite = bench.suite
    if not bench.is_cuda:
        suite.note("engine asleep", "left out: vLLM has no sleep mode on a CPU")
        return
    figures = _sleep(bench)
    taken = figures["free_before"] - figures["free_awake"]
    returned = figures["free_asleep"] - figures["free_awake"]
    note = f"{returned / 1e9:.1f} of {taken / 1e9:.1f} GB"
    name = "engine asleep: memory that it returns"
    suite.at_least(name, returned / taken, "", MIN_RETURNED_FRAC, note)
    suite.figure("engine asleep: falling asleep", figures["sleep_s"], "s")
    suite.at_most("engine asleep: waking up", figures["wake_s"], "s", MAX_WAKE_S)
    suite.at_least("engine asleep: same tokens afterwards", figures["is_same"], "", 1)


def _sleep(bench: DeviceBench) -> dict[str, Any]:
    """Return the figures of an engine with a random model in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as text:
        folder = Path(text)
        config = make_random_model(bench.sizes.model, device=bench.device).config
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(str(TOKENIZER), local_files_only=True).save_pretrained(folder)
        report = folder / "report.json"
        argv = [sys.executable, "-m", SLEEP_CHILD, str(folder), str(report)]
        child = ChildProcess("engine", argv, log_path=folder / "engine.log", cwd=ROOT)
        try:
            child.wait_until(report.exists, timeout_s=SLEEP_TIMEOUT_S)
        finally:
            child.clear_away()
        return json.loads(report.read_text(encoding="utf-8"))
