"""Laws of failures that no restart can mend: the run ends at once, in one line."""

import re
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import REPOSITORY, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.long
def test_model_removed_after_checks_ends_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(REPOSITORY / "configs/policies/tiny", model)
    with Run(tmp_path, f"model.path={model}") as run:
        run.wait_until(lambda: "started role=envhub" in run.output)
        shutil.rmtree(model)
        assert run.wait() == 2, run.output
        assert run.left_over() == []
    last = run.output.splitlines()[-1]
    assert last.startswith("error: ")
    assert f"error: model.path={model}: no such directory; give a checkpoint directory" in last
    assert "restart=" not in run.output


@pytest.mark.long
def test_refused_engine_argument_ends_the_run(tmp_path: Path) -> None:
    with Run(tmp_path, "actor.max_concurrent=50000") as run:
        assert run.wait() == 2, run.output
    assert re.fullmatch(
        r"error: actor-0: vLLM refuses its arguments: max_num_batched_tokens \(\d+\)"
        r" must be greater than or equal to max_num_seqs \(50000\)\."
        r" Change the keys of actor or model\.",
        run.output.splitlines()[-1],
    )
    assert "restart=" not in run.output


@pytest.mark.long
def test_two_identical_engine_failures_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "100000")  # GiB, more than any machine has
    with Run(tmp_path) as run:
        assert run.wait() == 1, run.output
    last = run.output.splitlines()[-1]
    assert last.startswith("error: actor-0 cannot start: EngineError: engine did not start: ")
    assert "; the cause is ValueError: Available memory" in last
    assert ". Two starts failed with this error. Log: " in last
    assert run.output.count("restart=") == 1
