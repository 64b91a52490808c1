"""Law of the page of recipes: each of its commands works, with small sizes, on this machine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.checks.fitting import merged_overrides
from common.config.requested import DEFAULT_CONFIG
from tests.docs.recipes import RECIPES, Recipe
from tests.end_to_end.runs import REPOSITORY, Run, balances
from tests.end_to_end.test_agents_of_others import python_of
from tests.envhub.envs.dataset.judges.judge_server import JudgeServer, serving
from tests.envhub.interop.test_mcp_package import MCP
from tests.learner.teacher.served import KEY, Teacher
from tests.venvs import python_with

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
RUN_S = 1500.0
CONTEXT = 2040  # Tokens; a teacher needs one more, and small policies have 2,048 positions.
SERVED_CONTEXT = 500  # Tokens; the teacher of the test has 512 positions.
FEW = (
    "train.num_steps=1",
    "groups.size=4",
    "groups.min_size=2",
    "groups.per_step=2",
    # A small policy solves few tasks of others, and equal rewards are no signal.
    "algorithm.filter_zero_variance=false",
    "learner.num_minibatches=1",
    "learner.max_tokens_per_microbatch=4096",
    "actor.max_concurrent=8",
    f"actor.max_model_len={CONTEXT}",
    "actor.max_turn_tokens=12",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "log.wandb=disabled",
    "log.live=false",
)
# Replace the GPUs and the model of a preset.
SMALL = (
    "model.dtype=float32",
    "machine.num_gpus=0",
    "machine.num_nodes=1",
    "learner.device=cpu",
    "learner.num_gpus=0",
    "learner.num_ranks=1",
    "learner.precision=fp32",
    "actor.num_gpus=0",
    "actor.num_actors=1",
    "actor.tensor_parallel_size=1",
    "actor.placement=auto",
    "actor.kv_cache_gib=1",
    "horizon.kind=fixed",
    "horizon.stages=[10]",
)
OFFLINE = {
    "sft": (
        "sft.num_demonstrations=8",
        "sft.num_epochs=1",
        "sft.batch_tokens=2048",
        "sft.output={folder}/policy",
    ),
    "dpo": ("dpo.output={folder}/policy",),
    "evolve": (
        "evolve.num_iterations=1",
        "evolve.items_per_iteration=16",
        "evolve.output={folder}/policy",
        "sft.num_epochs=1",
        "sft.batch_tokens=2048",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The replacements of things that the reader has: addresses, keys, an interpreter."""

    overrides: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    python: str = sys.executable


@contextmanager
def judge(_: Path) -> Iterator[Outside]:
    with serving(JudgeServer("Score: 5")) as server:
        yield Outside(overrides=(f"reward.judge.url={server.url}", "reward.judge.model=m"))


@contextmanager
def teacher(_: Path) -> Iterator[Outside]:
    served = Teacher()
    own = (
        f"algorithm.teacher.url={served.url}",
        "algorithm.teacher.model=m",
        "algorithm.teacher.key_env=KEY_OF_THE_TEACHER",
        f"actor.max_model_len={SERVED_CONTEXT}",
    )
    try:
        yield Outside(overrides=own, env={"KEY_OF_THE_TEACHER": KEY})
    finally:
        served.end()
        served.close()


@contextmanager
def hub(route: str) -> Iterator[Outside]:
    """Serve TextCraft by our own hub, on the routes of another project."""
    argv = [sys.executable, "run.py", "envhub", "env=textcraft", "port=0"]
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(line.split()[1] for line in lines if line.startswith("hub: "))
        try:
            yield Outside(overrides=(f"env.url={url}/{route}/textcraft",))
        finally:
            process.terminate()


def own_python(variable: str, requirement: str, folder: Path) -> Outside:
    return Outside(env={"AGENT_PYTHON": python_of(variable, requirement, folder)})


# Part of a command -> the thing that it needs.
NEEDS: dict[str, Callable[[Path], AbstractContextManager[Outside]]] = {
    "reward.judge.url=": judge,
    "algorithm.teacher.url=": teacher,
    "env.dialect=textcraft": lambda _: hub("agentgym"),
    "env.dialect=openenv": lambda _: hub("openenv"),
    "mcp:": lambda _: nullcontext(Outside(python=python_with(MCP, sees_ours=True))),
    "launcher=ray": lambda _: nullcontext(Outside(overrides=("ray.address=",))),
    "scheduler.port=7000": lambda _: nullcontext(Outside(overrides=("scheduler.port=0",))),
    "examples/mini-swe-agent": lambda folder: nullcontext(
        own_python("LONGSTRIDE_MINI_SWE_AGENT", "mini-swe-agent==2.4.6", folder)
    ),
    "examples/openai-agents": lambda folder: nullcontext(
        own_python("LONGSTRIDE_OPENAI_AGENTS", "openai-agents==0.24.0", folder)
    ),
}


@contextmanager
def outside_of(recipe: Recipe, folder: Path) -> Iterator[Outside]:
    """Yield the things that the command of a recipe needs from elsewhere."""
    needs = next((make for part, make in NEEDS.items() if part in recipe.command), None)
    with needs(folder) if needs else nullcontext(Outside()) as outside:
        yield outside


def small_overrides(recipe: Recipe, outside: Outside) -> list[str]:
    """Return the overrides of a recipe's command with small sizes."""
    policy: list[str] = []
    if recipe.configuration.machine.num_gpus:
        name = "tiny-arithmetic" if "--config dataset" in recipe.command else "tiny"
        policy = [*SMALL, f"model.path=configs/policies/{name}"]
    given = [*recipe.request.overrides, *policy, *FEW, *outside.overrides]
    return merged_overrides(given)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_command_of_a_recipe_works(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    if recipe.request.command in OFFLINE:
        run_offline(recipe, folder)
        return
    with outside_of(recipe, tmp_path) as outside:
        path = f"{Path(outside.python).parent}:{os.environ['PATH']}"
        run = Run(
            folder,
            *small_overrides(recipe, outside),
            config=recipe.request.config or DEFAULT_CONFIG,
            python=outside.python,
            env={"PATH": path, **outside.env},
        )
        with run:
            assert run.wait(timeout_s=RUN_S) == 0, run.output[-3_000:]
    assert [line["step"] for line in run.metrics()] == [1]
    ledger = run.read("ledger.json")
    assert balances(ledger)
    assert ledger["trained"] >= 4
    assert ledger["failed"] == 0


def run_offline(recipe: Recipe, folder: Path) -> None:
    """Run an offline command to its end; it must write a policy."""
    request = recipe.request
    own = [each.format(folder=folder) for each in OFFLINE[request.command]]
    where = [f"run.dir={folder}", "run.name=r", "log.wandb=disabled"]
    config = ["--config", request.config] if request.config else []
    argv = [sys.executable, "run.py", request.command, *config]
    done = subprocess.run(
        [*argv, *merged_overrides([*request.overrides, *own, *where])],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        timeout=RUN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    assert (folder / "policy" / "model.safetensors").is_file()
