"""The suites `peer` and `peer-pretrained`: TRL and this project on the same tasks, in turn.

This project trains twice: in lockstep like TRL, and asynchronously. All start from the same policy
and draw the same training items at the same horizons. Clocks begin with the first step, so startup
is left out. Saved policies are evaluated afterwards by the command `eval`. The first seed makes all
steps. Further seeds make only the steps needed to compare the time to a given success.
"""

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real_run import await_success, child, read_lines, train
from benchmarks.study.outcome import begin
from benchmarks.study.plan import CONFIG, OWN, merged
from benchmarks.study.tables import markdown
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import write_atomically
from tools.cli.bench import StudyConfig
from tools.cli.command_line import ParsedCommand

NOT_OURS = ("cpu/cores", "cpu/others_s", "cpu/per_trained_episode_s")
Curve = Sequence[tuple[float, float, float]]  # Wall seconds, processor seconds, success.


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of one comparison."""

    config: str
    script: str  # It trains with the peer.
    overrides: tuple[str, ...]
    num_steps: int
    keep_every_steps: int
    num_seeds: int
    further_share: float  # Fraction of `num_steps` for seeds after the first.
    step_s: float  # Time limit of a step on a slow machine.
    bar: float  # Held-out success to reach; 0: that of the peer's last policy.
    max_ratio: float  # Limit of the ratio of processor seconds to the bar.
    idle_step_s: float  # Approximate seconds of a step of one side on an idle machine.

    def bar_of(self, theirs: "Side") -> float:
        """Return the held-out success that all sides must reach."""
        return self.bar or theirs.curve()[-1][2]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClocks:
    """The clocks at the end of a step, relative to the start of the first one."""

    step: int
    wall_s: float
    cpu_s: float


def steps_of(lines: Sequence[dict[str, Any]]) -> list[StepClocks]:
    """Return the clocks of a run's metrics. The first step counts as long as the others' mean."""
    steps = [line for line in lines if line["step"]]
    used = [
        sum(v for k, v in line.items() if k.startswith("cpu/") and k not in NOT_OURS)
        for line in steps
    ]
    walls = [line["time_s"] for line in steps]
    num = max(len(steps) - 1, 1)
    wall_0, cpu_0 = (each[0] - (each[-1] - each[0]) / num for each in (walls, used))
    return [
        StepClocks(step=line["step"], wall_s=wall - wall_0, cpu_s=cpu - cpu_0)
        for line, wall, cpu in zip(steps, walls, used, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The training of one side with one seed."""

    seed: int
    steps: list[StepClocks]
    success: dict[int, float]  # Success of the saved policies, by step.

    def curve(self) -> Curve:
        """Return the clocks and the success of each saved policy."""
        ends = {each.step: each for each in self.steps}
        found = ((ends[step], value) for step, value in sorted(self.success.items()))
        return [(end.wall_s, end.cpu_s, value) for end, value in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One compared side with all its seeds."""

    name: str
    courses: list[Course]

    def per_step(self) -> tuple[float, float]:
        """Return the mean (wall, processor) seconds of a step."""
        ends = [each.steps[-1] for each in self.courses]
        num = sum(end.step for end in ends)
        return sum(end.wall_s for end in ends) / num, sum(end.cpu_s for end in ends) / num

    def curve(self) -> Curve:
        """Return the mean of the curves over the seeds, up to the shortest one."""
        together = zip(*(each.curve() for each in self.courses), strict=False)
        return [tuple(np.mean(points, axis=0).tolist()) for points in together]


def spent_to(success: float, curve: Curve) -> tuple[float, float]:
    """Return the (wall, processor) seconds until a held-out success; infinite if it never is.

    The values are interpolated linearly between two saved policies.
    """
    before = (0.0, 0.0)
    reached: float | None = None  # None: no policy was saved before.
    for wall_s, cpu_s, value in curve:
        spent = (wall_s, cpu_s)
        if value >= success:
            share = 1.0 if reached is None else (success - reached) / max(value - reached, 1e-9)
            wall, cpu = (a + share * (b - a) for a, b in zip(before, spent, strict=True))
            return wall, cpu
        before = spent
        reached = value
    return float("inf"), float("inf")


def add_sides(suite: Suite, setup: Setup, theirs: Side, *ours: Side) -> None:
    """Add the figures of all sides, and the bounded one: the processor seconds to the bar."""
    bar = setup.bar_of(theirs)
    limits = spent_to(bar, theirs.curve())
    for side in ours:
        for clock, a, b in zip(("wall", "CPU"), side.per_step(), theirs.per_step(), strict=True):
            suite.compare(f"{side.name}: {clock} s of a step", a, b, "s", against=theirs.name)
        name = f"seconds to held-out success {bar:.3f}, mean of seeds"
        if np.isinf(limits[0]):
            suite.note(f"{side.name}: {name}", f"the mean of {theirs.name} did not reach it")
            continue
        wall_s, cpu_s = spent_to(bar, side.curve())
        label = f"{side.name}: wall {name}"
        suite.compare(label, wall_s, limits[0], "s", against=theirs.name)
        label = f"{side.name}: CPU {name}"
        suite.compare(label, cpu_s, limits[1], "s", against=theirs.name, at_most=setup.max_ratio)


def comparison(setup: Setup, sides: Sequence[Side]) -> str:
    """Return the table: seconds of a step, success after seconds of training, CPU s to the bar."""
    bar = setup.bar_of(sides[0])
    rows: list[list[str]] = []
    for side in sides:
        wall, cpu = (f"{value:.1f} s" for value in side.per_step())
        rows.append([f"{side.name}, mean", wall, cpu, *_cells(bar, side.curve())])
        rows += [[f"seed {one.seed}", "", "", *_cells(bar, one.curve())] for one in side.courses]
    heads = ["wall per step", "CPU per step", "held-out success after s of training"]
    return markdown(["", *heads, f"CPU s to {bar:.3f}"], rows)


def _cells(bar: float, curve: Curve) -> list[str]:
    """Return the cells of a learning curve."""
    course = ", ".join(f"{value:.3f} at {wall_s:,.0f}" for wall_s, _, value in curve)
    return [course, f"{spent_to(bar, curve)[1]:,.0f}"]


REQUIREMENT = "trl==1.16.0"
SIDE_S = 1800.0  # Time limit before the first step.
PIP_S = 900.0
# On the CPU, TRL's engine runs in its own process with one thread, as in this project.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",  # Spinning threads would cost processor seconds.
    "CUDA_VISIBLE_DEVICES": "",
}
TRAINING_ALONE = (
    "log.wandb=disabled",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "learner.keep_checkpoints=1000",
)
SETUPS = {
    "peer": Setup(
        config=CONFIG,
        script="docs/examples/trl_quickstart.py",
        overrides=(
            # The quickstart's own policy exceeds the bar after a few steps.
            "model.path=configs/policies/tiny",
            # Optimizer, schedule and batches of TRL: AdamW, linear decay to zero, all episodes.
            "learner.optimizer=adamw",
            "learner.decay_start_frac=0",
            "learner.min_lr_frac=0",
            "algorithm.filter_zero_variance=false",
            "model.dtype=bfloat16",  # The engine's type, as vLLM chooses it for TRL.
            "eval.num_items=600",
            *TRAINING_ALONE,
        ),
        num_steps=320,
        keep_every_steps=40,
        num_seeds=3,
        further_share=0.625,
        step_s=60.0,
        bar=0.687,  # Held-out success of TRL after 320 steps, at the first measurement.
        max_ratio=1 / 3,
        idle_step_s=2.8,
    ),
    # The preset as it is. TRL receives its learning rates and reward.
    "peer-pretrained": Setup(
        config="smollm2-chain-sum",
        script="docs/examples/trl_dataset.py",
        overrides=TRAINING_ALONE,
        num_steps=40,
        keep_every_steps=10,
        num_seeds=1,
        further_share=1.0,
        step_s=300.0,
        bar=0.0,
        max_ratio=1 / 2,
        idle_step_s=30.0,
    ),
}
OURS = {  # Name in the table -> name of the run, and its own overrides.
    "this project in lockstep": ("ours-lockstep", ["train.mode=sync"]),
    "this project": ("ours", []),
}


def measure(name: str, request: ParsedCommand, suite: Suite) -> None:
    """Train all sides below `runs/study-NAME` and compare them. Completed runs are not repeated.

    Raises: LongstrideError: a side failed; names its log.
    """
    setup = SETUPS[name]
    own = [each for each in request.overrides if not each.startswith(OWN)]
    fixed = (
        f"train.num_steps={setup.num_steps}",
        f"learner.checkpoint_every_steps={setup.keep_every_steps}",
    )
    overrides = merged((*setup.overrides, *fixed), own)
    free = [each for each in overrides if each not in own]
    cfg = load_config(setup.config, [*request.overrides, *free], schema=StudyConfig)
    steps = max(1, round(cfg.train.num_steps * cfg.study.size))
    overrides = merged(overrides, [f"train.num_steps={steps}"])
    folder = ROOT / cfg.run.dir / (cfg.study.folder or f"study-{name}")
    every = setup.keep_every_steps
    further = max(1, round(setup.further_share * steps / every)) * every
    num_seeds = cfg.study.num_seeds or setup.num_seeds
    lengths = [min(steps, further) if seed else steps for seed in range(num_seeds)]
    hours = setup.idle_step_s * sum(lengths) * 3 / 3600 + 0.5
    suite.title(
        f"{REQUIREMENT} and this project, {' + '.join(map(str, lengths))} steps each, in {folder}; "
        f"about {hours:.1f} h of an idle two-core machine"
    )
    if request.is_dry:
        return
    folder.mkdir(parents=True, exist_ok=True)
    begin(folder / "sides", overrides)
    sides = [Side(name=name, courses=[]) for name in (REQUIREMENT, *OURS)]
    for seed, length in enumerate(lengths, start=cfg.run.seed):
        for side in sides:
            plan = _Plan(setup, seed, length, steps, tuple(overrides), folder / f"seed{seed}")
            plan.folder.mkdir(exist_ok=True)
            clocks, policies = _ours(plan, side.name) if side.name in OURS else _theirs(plan)
            success = _scored(plan, side.name, policies)
            side.courses.append(Course(seed=seed, steps=clocks, success=success))
    add_sides(suite, setup, *sides)
    text = comparison(setup, sides)
    write_atomically(folder / "table.md", text)
    suite.title(text.rstrip())


@dataclass(frozen=True, slots=True)
class _Plan:
    """The training of all sides with one seed: the first `length` of `num_steps` steps."""

    setup: Setup
    seed: int
    length: int
    num_steps: int
    overrides: tuple[str, ...]
    folder: Path

    def with_seed(self, *own: str) -> list[str]:
        return merged(self.overrides, [f"run.seed={self.seed}", *own])

    @property
    def timeout_s(self) -> float:
        return SIDE_S + self.setup.step_s * self.length


Played = tuple[list[StepClocks], dict[int, Path]]  # Steps, and policies by step.


def _theirs(plan: _Plan) -> Played:
    """Train with TRL unless this is already done."""
    out = plan.folder / "trl"
    if not (out / "done").exists():
        python = peer_python(plan.folder.parent / "environment")
        out.mkdir(exist_ok=True)
        (out / "steps.jsonl").unlink(missing_ok=True)
        path = plan.folder / "trl.json"
        settings = {
            "config": plan.setup.config,
            "overrides": plan.with_seed(),
            "keep_every_steps": plan.setup.keep_every_steps,
            "out": str(out),
            "last_step": plan.length,
        }
        path.write_text(json.dumps(settings), encoding="utf-8")
        argv = [str(python), plan.setup.script, str(path)]
        log = plan.folder / "trl.log"
        process = ChildProcess("TRL", argv, log_path=log, cwd=ROOT, env=ENVIRONMENT)
        try:
            await_success(process, timeout_s=plan.timeout_s)
        finally:
            process.stop(timeout_s=5)
        (out / "done").touch()
    kept = {int(each.name.partition("-")[2]): each for each in out.glob("policy-*")}
    return [StepClocks(**line) for line in read_lines(out / "steps.jsonl")], kept


def peer_python(folder: Path) -> Path:
    """Return the interpreter of an environment with TRL in addition to this project's packages.

    The environment is made once. Nothing is installed into the project's own environment.

    Raises: LongstrideError: pip failed; holds the end of its output.
    """
    python = folder / "bin" / "python"
    if (folder / "whole").exists():
        return python
    commands = [
        [sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", "-q", "--python", str(python), "install", REQUIREMENT],
    ]
    for command in commands:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=PIP_S
        )
        if done.returncode:
            raise LongstrideError(f"{' '.join(command)}: {done.stderr[-400:].strip()}")
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        own = folder / "lib" / version / "site-packages" / "project.pth"
        own.write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    (folder / "whole").touch()
    return python


def _ours(plan: _Plan, name: str) -> Played:
    """Train with this project unless this is already done."""
    run_name, own = OURS[name]
    run = plan.folder / run_name
    if not (run / "report.json").exists():
        overrides = plan.with_seed("log.live=false", *_shortened(plan), *own)
        train(
            run_name,
            overrides,
            folder=plan.folder,
            timeout_s=plan.timeout_s,
            config=plan.setup.config,
        )
    kept = {int(each.name[5:]): each for each in (run / "checkpoints").glob("step-*")}
    return steps_of(read_lines(run / "metrics.jsonl")), kept


def _shortened(plan: _Plan) -> list[str]:
    """Return the overrides of a run that makes only the first steps of a linear decay to zero."""
    if plan.length == plan.num_steps:
        return []
    # Learning rate at the last step of the shortened schedule, as a fraction.
    least = 1 - plan.length / plan.num_steps
    return [f"train.num_steps={plan.length}", f"learner.min_lr_frac={least}"]


def _scored(plan: _Plan, name: str, policies: dict[int, Path]) -> dict[int, float]:
    """Return the held-out success of each saved policy. Known results are not measured again."""
    side = name.partition("=")[0].replace(" ", "-")
    found: dict[int, float] = {}
    for step, policy in sorted(policies.items()):
        eval_name = f"{side}-eval-{step}"
        path = plan.folder / eval_name / "eval.json"
        if not path.exists():
            _evaluate(plan, eval_name, policy)
        entry = json.loads(path.read_text(encoding="utf-8"))["entries"][-1]
        found[step] = entry["overall"]["success"]["mean"]
    return found


def _evaluate(plan: _Plan, name: str, policy: Path) -> None:
    """Evaluate a policy with the command `eval`."""
    # Evaluations of all seeds use the same random numbers.
    own = plan.with_seed("run.seed=0", f"model.path={policy}")
    where = [f"run.dir={plan.folder}", f"run.name={name}"]
    argv = ["run.py", "eval", "--config", plan.setup.config, *where, *own]
    with child(name, argv, log=plan.folder / f"{name}.log") as process:
        await_success(process, timeout_s=SIDE_S)
