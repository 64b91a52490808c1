"""Law of the page of recipes: each of its commands works, with small sizes, on this machine."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from safetensors.torch import load_file

from common.config.load import load_config
from tests.docs.recipes import RECIPES, Recipe
from tests.end_to_end.recipe_sizes import small_overrides
from tests.end_to_end.runs import REPOSITORY, Run, balances
from tests.end_to_end.test_agents_of_others import python_of
from tests.envhub.envs.dataset.judges.judge_server import JudgeServer, serving
from tests.envhub.envs.terminal.container_tasks import write_task
from tests.envhub.envs.terminal.test_containers import problem
from tests.envhub.interop.test_mcp_package import MCP
from tests.learner.teacher.served import KEY, Teacher
from tests.venvs import python_with
from tools.checks.served_engines import merged_overrides
from tools.cli.requested import DEFAULT_CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]
RUN_S = 1500.0
SERVED_CONTEXT = 500  # Tokens; the teacher of the test has 512 positions.
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
    scores = (f"Score: {number % 10}" for number in range(1_000))
    with serving(JudgeServer(*scores)) as server:
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


def package(requirement: str) -> AbstractContextManager[Outside]:
    return nullcontext(Outside(python=python_with(requirement, sees_ours=True)))


def own_python(variable: str, requirement: str, folder: Path) -> Outside:
    return Outside(env={"AGENT_PYTHON": python_of(variable, requirement, folder)})


@contextmanager
def containers(folder: Path) -> Iterator[Outside]:
    if reason := problem():
        pytest.skip(reason)
    write_task(folder / "tasks", "no-python")
    yield Outside(overrides=(f"envs.terminal.train={folder / 'tasks'}",))


# Part of a command -> the thing that it needs.
NEEDS: dict[str, Callable[[Path], AbstractContextManager[Outside]]] = {
    "reward.judge.url=": judge,
    "algorithm.teacher.url=": teacher,
    "env.dialect=textcraft": lambda _: hub("agentgym"),
    "env.dialect=openenv": lambda _: hub("openenv"),
    "sandbox.backend=podman": containers,
    "mcp:": lambda _: package(MCP),
    "--config smollm2-chain-sum": lambda _: package("reasoning-gym==0.1.25"),
    "--config smollm2-textworld": lambda _: package("textworld==1.7.0"),
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
            *small_overrides(recipe, tmp_path, *outside.overrides),
            config=recipe.request.config or DEFAULT_CONFIG,
            python=outside.python,
            env={"PATH": path, **outside.env},
        )
        with run:
            assert run.wait(timeout_s=RUN_S) == 0, run.output[-3_000:]
    (step,) = run.metrics()
    assert (step["step"], step["train/num_updates"], step["train/num_bad_updates"]) == (1, 1, 0)
    assert math.isfinite(step["train/grad_norm"])
    assert step["train/grad_norm"] > 0
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
    overrides = merged_overrides([*request.overrides, *own, *where])
    start = load_config(request.config or DEFAULT_CONFIG, overrides)
    argv = [sys.executable, "run.py", request.command, *config]
    done = subprocess.run(
        [*argv, *overrides],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        timeout=RUN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    before = load_file(REPOSITORY / start.model.path / "model.safetensors")
    after = load_file(folder / "policy" / "model.safetensors")
    assert all(each.isfinite().all() for each in after.values())
    assert any(not after[name].equal(each) for name, each in before.items())
