"""An engine that sleeps and wakes up, as a process: `-m benchmarks.actor.sleep MODEL REPORT`.

The report is a JSON object with the free memory of the GPU in bytes, seconds, and whether the
sampled tokens are the same afterwards.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from common.store.run_dir import write_atomically

GPU_MEMORY_FRAC = 0.3
PROMPT = [1, 2, 3]


def measure(model_path: str) -> dict[str, Any]:
    """Return the figures of one sleep of level 1: the weights move to the host."""
    free_before = _free_bytes()
    llm = LLM(
        model=model_path,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enforce_eager=True,
        gpu_memory_utilization=GPU_MEMORY_FRAC,
        max_model_len=256,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
    )
    before = _sample(llm)
    free_awake = _free_bytes()
    began = time.monotonic()
    llm.sleep(level=1)
    slept = time.monotonic()
    free_asleep = _free_bytes()
    llm.wake_up()
    woke = time.monotonic()
    return {
        "free_before": free_before,
        "free_awake": free_awake,
        "free_asleep": free_asleep,
        "sleep_s": slept - began,
        "wake_s": woke - slept,
        "is_same": float(_sample(llm) == before),
    }


def _free_bytes() -> int:
    """Return the free memory of the GPU."""
    return torch.cuda.mem_get_info()[0]


def _sample(llm: LLM) -> list[int]:
    """Return the tokens that the engine samples greedily."""
    how = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def main(argv: list[str]) -> None:
    """Measure the memory that a sleeping engine returns, and write the report."""
    model_path, report = argv
    write_atomically(Path(report), json.dumps(measure(model_path)))


if __name__ == "__main__":
    main(sys.argv[1:])
