"""A checkpoint for images trains its language model in a whole run, and is complete again."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.conformance.networks import composite_architecture, save_composite
from tests.end_to_end.runs import REPOSITORY, RUN_S, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAMILY = "gemma3"
TEXT = "language_model."  # Begin of the published names of its language model.
CANARY = "weights/canary_abs_logprob"
# A random network solves nothing, so half of its answers are paid by chance.
REWARD = "def paid(completion):\n    return float(sum(map(ord, completion)) % 2)\n"
ADAPTERS = ("learner.lora.rank=4", "learner.optimizer=adamw", "learner.lr=1e-3")
SETTINGS = (
    "groups.size=4",
    "groups.per_step=2",
    "groups.min_size=2",
    "actor.max_concurrent=8",
    "learner.precision=fp32",
    "learner.checkpoint_every_steps=1",
    "learner.keep_checkpoints=1",
    "learner.warmup_steps=0",
    "eval.num_items=4",
    "eval.baselines=false",
    "log.wandb=disabled",
    "log.live=false",
)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def check_written(start: Path, written: Path) -> None:
    """Check that a checkpoint is its source with other weights of the language model."""
    before = tensors_in(start)
    after = tensors_in(written)
    assert before.keys() == after.keys()
    towers = {name for name in before if not name.startswith(TEXT)}
    assert towers
    for name in towers:
        assert torch.equal(before[name], after[name]), name
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - towers)
    kind: Any = getattr(transformers, composite_architecture(FAMILY))
    _, report = kind.from_pretrained(written, output_loading_info=True, local_files_only=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (written / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    config.pop("prompt_style", None)  # A run names the style of its prompts there.
    assert config == json.loads((start / "config.json").read_text(encoding="utf-8"))


def trained(start: Path, folder: Path, *settings: str) -> Path:
    """Train a composite; return the last checkpoint. Engines have the learner's weights."""
    (folder / "paid.py").write_text(REWARD, encoding="utf-8")
    where = (f"model.path={start}", f"reward={folder / 'paid.py'}:paid")
    with Run(folder, *SETTINGS, *where, *settings, config="dataset") as run:
        assert run.wait() == 0, run.output
    assert all(line[CANARY] < 1e-3 for line in run.metrics() if CANARY in line)
    return max((run.root / "checkpoints").glob("step-*"))


def check_scored(folder: Path) -> None:
    """Check that an engine has scored canary prompts: a busy one answers a step later."""
    lines = (folder / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert any(CANARY in json.loads(line) for line in lines)


@pytest.mark.parametrize(
    "more",
    [("learner.publish=delta",), pytest.param(("learner.num_ranks=2",), marks=pytest.mark.long)],
)
def test_run_trains_the_language_model_and_keeps_the_rest(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    start = save_composite(FAMILY, tmp_path / "start")
    for num_steps in (2, 8):  # The second start continues from the first one's checkpoint.
        written = trained(start, tmp_path, *more, f"train.num_steps={num_steps}")
        check_written(start, written)
    check_scored(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_are_merged_into_a_whole_checkpoint(num_ranks: int, tmp_path: Path) -> None:
    start = save_composite(FAMILY, tmp_path / "start")
    for num_steps in (2, 4):
        more = (f"learner.num_ranks={num_ranks}", f"train.num_steps={num_steps}")
        written = trained(start, tmp_path, *ADAPTERS, *more)
    check_scored(tmp_path)
    assert {path.name for path in written.glob("*.safetensors")} == {"adapter_model.safetensors"}
    where = (f"run.dir={tmp_path}", "run.name=r")
    merge = [sys.executable, "run.py", "merge", *where]
    subprocess.run(merge, cwd=REPOSITORY, check=True, timeout=RUN_S)
    check_written(start, tmp_path / "r" / "policy")
