"""Laws of a pretrained model: engines and learner agree in each precision, GGUF is served."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
import requests

from tests.end_to_end.runs import REPOSITORY, Run
from tests.pretrained import download_smollm2, make_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

NUM_STEPS = 8
RUN_S = 1800.0
OVERRIDES = (
    "reward=docs/examples/dataset/grade.py:overlap",  # Answers differ, so groups have signal.
    "data.system=Solve the problem. Put the final number after ####.",
    f"train.num_steps={NUM_STEPS}",
    "groups.size=4",
    "groups.per_step=1",
    "groups.min_size=2",
    "actor.max_concurrent=8",
    "actor.max_model_len=192",
    "actor.max_turn_tokens=16",
    "learner.optimizer=adamw",
    "learner.max_tokens_per_microbatch=1024",
    "learner.checkpoint_every_steps=1000",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.wandb=disabled",
)
ADAPTERS = ("learner.lora.rank=16", "learner.lr=1e-4")
FULL = ("learner.lr=1e-5",)
# The noise of bf16 is about .03 nats. Where engines lose the learner, it grows by .03 a version.
LIMITS = {"float32": 1e-4, "bfloat16": 0.06}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.parametrize(
    ("trained", "dtype", "num_ranks"),
    [
        (FULL, "float32", 1),
        (FULL, "bfloat16", 1),
        (ADAPTERS, "bfloat16", 1),
        (ADAPTERS, "float32", 2),
    ],
)
def test_canary_of_a_pretrained_model_stays_flat(
    smollm2: Path, tmp_path: Path, trained: tuple[str, ...], dtype: str, num_ranks: int
) -> None:
    precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
    chosen = (f"model.path={smollm2}", f"model.dtype={dtype}", f"learner.precision={precision}")
    ranks = f"learner.num_ranks={num_ranks}"
    with Run(tmp_path, *OVERRIDES, *trained, *chosen, ranks, config="dataset") as run:
        assert run.wait(timeout_s=RUN_S) == 0, run.output[-2_000:]
    lines = run.metrics()
    assert len(lines) == NUM_STEPS
    name = "weights/canary_abs_logprob"  # A busy engine answers a step later.
    noise = [line[name] for line in lines if name in line]
    assert len(noise) > NUM_STEPS / 2
    assert max(noise) < LIMITS[dtype]
    assert fmean(noise[-3:]) < 1.5 * fmean(noise[:3]) + LIMITS[dtype] / 10
    assert any(line["train/grad_norm"] > 0 for line in lines)


def test_gguf_file_answers(tmp_path: Path) -> None:
    path = download_smollm2(tmp_path)
    keys = (f"model.path={path}", "model.dtype=float32", "policy.max_model_len=256")
    where = (f"run.dir={tmp_path}", "run.name=r", "policy.port=0", "actor.kv_cache_gib=1")
    with subprocess.Popen(
        [sys.executable, "run.py", "serve", *keys, *where],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    ) as process:
        try:
            assert process.stdout is not None
            line = next(each for each in process.stdout if each.startswith("policy: "))
            question = {"role": "user", "content": "What is 3 + 4?"}
            body = {"model": "m", "messages": [question], "max_tokens": 12, "temperature": 0}
            url = f"{line.split()[1]}/chat/completions"
            answer = requests.post(url, json=body, timeout=RUN_S).json()
        finally:
            process.send_signal(signal.SIGINT)
    assert "3 + 4 = 7" in answer["choices"][0]["message"]["content"]
    assert len(list((tmp_path / "cache" / "longstride" / "dequantised").glob("Smol*"))) == 1
