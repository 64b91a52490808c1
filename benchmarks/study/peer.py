"""The suite `peer`: TRL and this project on the quickstart's tasks, one after the other.

This project trains twice: in lockstep like TRL, and asynchronously. All start from the same policy
and draw the same training items at the same horizons. Clocks begin with the first step, so startup
is left out. Saved policies are evaluated afterwards by the same player. The first seed makes all
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

from benchmarks.runs.real_run import await_success, read_lines, train
from benchmarks.study.command import heldout_success
from benchmarks.study.outcome import begin
from benchmarks.study.plan import CONFIG, OWN, merged
from benchmarks.study.sides import Course, StepClocks, StudyArm, add_sides, comparison
from benchmarks.table import BenchTable
from common.config.command_line import ParsedCommand
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.launch.process import ChildProcess
from common.store.run_dir import write_atomically

REQUIREMENT = "trl==1.16.0"
SCRIPT = "docs/examples/trl_quickstart.py"
KEEP_EVERY_STEPS = 40
NUM_STEPS = 320
NUM_SEEDS = 3
FURTHER_SHARE = 0.625  # Fraction of `NUM_STEPS` for seeds after the first.
STEP_S = 60.0  # Time limit of a step on a slow machine.
SIDE_S = 1800.0  # Time limit before the first step.
PIP_S = 900.0
NOT_OURS = ("cpu/cores", "cpu/others_s", "cpu/per_trained_episode_s")
# On the CPU, TRL's engine runs in its own process with one thread, as in this project.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
OVERRIDES = (
    # The quickstart's own policy exceeds the bar after a few steps.
    "model.path=configs/policies/tiny",
    # Optimizer, schedule and batches of TRL: AdamW, linear decay to zero, all episodes of a step.
    "learner.optimizer=adamw",
    "learner.decay_start_frac=0",
    "learner.min_lr_frac=0",
    "algorithm.filter_zero_variance=false",
    "model.dtype=bfloat16",  # The engine's type, as vLLM chooses it for TRL.
    f"train.num_steps={NUM_STEPS}",
    "log.wandb=disabled",
    "eval.before=false",
    "eval.after=false",
    "eval.baselines=false",
    "eval.num_items=600",
    f"learner.checkpoint_every_steps={KEEP_EVERY_STEPS}",
    "learner.keep_checkpoints=1000",
)
OURS = {  # Name in the table -> name of the run, and its own overrides.
    "this project in lockstep": ("ours-lockstep", ["train.mode=sync"]),
    "this project": ("ours", []),
}


def measure(_: str, request: ParsedCommand, table: BenchTable, *, root: Path) -> None:
    """Train all sides below `runs/study-peer` and compare them. Completed runs are not repeated.

    Raises: LongstrideError: a side failed; names its log.
    """
    own = [each for each in request.overrides if not each.startswith(OWN)]
    overrides = merged(OVERRIDES, own)
    free = [each for each in overrides if each not in own]
    cfg = load_config(CONFIG, [*request.overrides, *free], root=root)
    steps = max(1, round(cfg.train.num_steps * cfg.study.size))
    overrides = merged(overrides, [f"train.num_steps={steps}"])
    folder = root / cfg.run.dir / (cfg.study.folder or "study-peer")
    further = max(1, round(FURTHER_SHARE * steps / KEEP_EVERY_STEPS)) * KEEP_EVERY_STEPS
    num_seeds = cfg.study.num_seeds or NUM_SEEDS
    lengths = [min(steps, further) if seed else steps for seed in range(num_seeds)]
    table.title(
        f"{REQUIREMENT} and this project, {' + '.join(map(str, lengths))} steps each, in {folder}; "
        f"about {2.8 * sum(lengths) * 3 / 3600 + 0.2:.1f} h of an idle two-core machine"
    )
    if request.is_dry:
        return
    folder.mkdir(parents=True, exist_ok=True)
    begin(folder / "sides", overrides)
    sides = {name: StudyArm(name=name, courses=[]) for name in (REQUIREMENT, *OURS)}
    for seed, length in enumerate(lengths, start=cfg.run.seed):
        for name, side in sides.items():
            plan = _Plan(seed, length, tuple(overrides), folder / f"seed{seed}", root)
            plan.folder.mkdir(exist_ok=True)
            steps_made, policies = _ours(plan, name) if name in OURS else _theirs(plan)
            success = _scored(plan, name, policies)
            side.courses.append(Course(seed=seed, steps=steps_made, success=success))
    add_sides(table, *sides.values(), horizons=cfg.horizon.stages)
    text = comparison(list(sides.values()), horizons=cfg.horizon.stages)
    write_atomically(folder / "table.md", text)
    table.title(text.rstrip())


@dataclass(frozen=True, slots=True)
class _Plan:
    """The training of all sides with one seed: the first `length` steps."""

    seed: int
    length: int
    overrides: tuple[str, ...]
    folder: Path
    root: Path

    def with_seed(self, *own: str) -> list[str]:
        return merged(self.overrides, [f"run.seed={self.seed}", *own])

    def config(self, *own: str) -> RunConfig:
        return load_config(CONFIG, self.with_seed(*own), root=self.root)

    @property
    def timeout_s(self) -> float:
        return SIDE_S + STEP_S * self.length


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
            "overrides": plan.with_seed(),
            "keep_every_steps": KEEP_EVERY_STEPS,
            "out": str(out),
            "last_step": plan.length,
        }
        path.write_text(json.dumps(settings), encoding="utf-8")
        argv = [str(python), SCRIPT, str(path)]
        log = plan.folder / "trl.log"
        child = ChildProcess("TRL", argv, log_path=log, cwd=plan.root, env=ENVIRONMENT)
        try:
            await_success(child, timeout_s=plan.timeout_s)
        finally:
            child.stop(timeout_s=5)
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
    cfg = plan.config()
    if not (run / "report.json").exists():
        # Learning rate at the last step of the shortened schedule, as a fraction.
        least = 1 - plan.length / cfg.train.num_steps
        cut = [f"train.num_steps={plan.length}", f"learner.min_lr_frac={least}"]
        overrides = plan.with_seed("log.live=false", *cut, *own)
        train(run_name, overrides, folder=plan.folder, timeout_s=plan.timeout_s)
    kept = {int(each.name[5:]): each for each in (run / "checkpoints").glob("step-*")}
    return steps_of(read_lines(run / "metrics.jsonl"), cfg.horizon.stages), kept


def steps_of(lines: Sequence[dict[str, Any]], stages: Sequence[int]) -> list[StepClocks]:
    """Return the clocks of a run's metrics. The first step counts as long as the others' mean.

    Args:
        stages: of the horizon. The mean horizon over subsets may lie between two stages.
    """
    steps = [line for line in lines if line["step"]]
    used = [
        sum(v for k, v in line.items() if k.startswith("cpu/") and k not in NOT_OURS)
        for line in steps
    ]
    walls = [line["time_s"] for line in steps]
    num = max(len(steps) - 1, 1)
    wall_0, cpu_0 = (each[0] - (each[-1] - each[0]) / num for each in (walls, used))
    return [
        StepClocks(
            step=line["step"],
            wall_s=wall - wall_0,
            cpu_s=cpu - cpu_0,
            horizon=stages[round(line["horizon/stage"])],
        )
        for line, wall, cpu in zip(steps, walls, used, strict=True)
    ]


def _scored(plan: _Plan, name: str, policies: dict[int, Path]) -> dict[int, float]:
    """Return the held-out success of each saved policy. Known results are not measured again."""
    path = plan.folder / f"{name.partition('=')[0].replace(' ', '-')}-success.json"
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for step, policy in sorted(policies.items()):
        if str(step) not in known:
            # Evaluations of all seeds use the same random numbers.
            known[str(step)] = heldout_success(plan.config("run.seed=0"), policy)
            write_atomically(path, json.dumps(known))
    return {int(step): success for step, success in known.items()}
