"""The suite `peer`: TRL and this project on the quickstart's tasks, one after the other.

This project trains twice: in lockstep like TRL, and asynchronously. All start from the same policy
and draw the same training items at the same horizons. Clocks begin with the first step, so startup
is left out. Saved policies are evaluated afterwards by the command `eval`. The first seed makes all
steps. Further seeds make only the steps needed to compare the time to a given success.
"""

import json
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_run import await_success, child, read_lines, train
from benchmarks.study.outcome import begin
from benchmarks.study.plan import CONFIG, OWN, merged
from benchmarks.study.sides import Course, Side, StepClocks, add_sides, comparison, steps_of
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.repository import ROOT
from common.store.run_dir import write_atomically
from tools.cli.bench import StudyConfig
from tools.cli.command_line import ParsedCommand

REQUIREMENT = "trl==1.16.0"
SCRIPT = "docs/examples/trl_quickstart.py"
KEEP_EVERY_STEPS = 40
NUM_STEPS = 320
NUM_SEEDS = 3
FURTHER_SHARE = 0.625  # Fraction of `NUM_STEPS` for seeds after the first.
STEP_S = 60.0  # Time limit of a step on a slow machine.
SIDE_S = 1800.0  # Time limit before the first step.
PIP_S = 900.0
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


def measure(_: str, request: ParsedCommand, suite: Suite) -> None:
    """Train all sides below `runs/study-peer` and compare them. Completed runs are not repeated.

    Raises: LongstrideError: a side failed; names its log.
    """
    own = [each for each in request.overrides if not each.startswith(OWN)]
    overrides = merged(OVERRIDES, own)
    free = [each for each in overrides if each not in own]
    cfg = load_config(CONFIG, [*request.overrides, *free], schema=StudyConfig)
    steps = max(1, round(cfg.train.num_steps * cfg.study.size))
    overrides = merged(overrides, [f"train.num_steps={steps}"])
    folder = ROOT / cfg.run.dir / (cfg.study.folder or "study-peer")
    further = max(1, round(FURTHER_SHARE * steps / KEEP_EVERY_STEPS)) * KEEP_EVERY_STEPS
    num_seeds = cfg.study.num_seeds or NUM_SEEDS
    lengths = [min(steps, further) if seed else steps for seed in range(num_seeds)]
    suite.title(
        f"{REQUIREMENT} and this project, {' + '.join(map(str, lengths))} steps each, in {folder}; "
        f"about {2.8 * sum(lengths) * 3 / 3600 + 0.5:.1f} h of an idle two-core machine"
    )
    if request.is_dry:
        return
    folder.mkdir(parents=True, exist_ok=True)
    begin(folder / "sides", overrides)
    sides = [Side(name=name, courses=[]) for name in (REQUIREMENT, *OURS)]
    for seed, length in enumerate(lengths, start=cfg.run.seed):
        for side in sides:
            plan = _Plan(seed, length, steps, tuple(overrides), folder / f"seed{seed}")
            plan.folder.mkdir(exist_ok=True)
            clocks, policies = _ours(plan, side.name) if side.name in OURS else _theirs(plan)
            success = _scored(plan, side.name, policies)
            side.courses.append(Course(seed=seed, steps=clocks, success=success))
    add_sides(suite, *sides)
    text = comparison(sides)
    write_atomically(folder / "table.md", text)
    suite.title(text.rstrip())


@dataclass(frozen=True, slots=True)
class _Plan:
    """The training of all sides with one seed: the first `length` of `num_steps` steps."""

    seed: int
    length: int
    num_steps: int
    overrides: tuple[str, ...]
    folder: Path

    def with_seed(self, *own: str) -> list[str]:
        return merged(self.overrides, [f"run.seed={self.seed}", *own])

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
        # Learning rate at the last step of the shortened schedule, as a fraction.
        least = 1 - plan.length / plan.num_steps
        cut = [f"train.num_steps={plan.length}", f"learner.min_lr_frac={least}"]
        overrides = plan.with_seed("log.live=false", *cut, *own)
        train(run_name, overrides, folder=plan.folder, timeout_s=plan.timeout_s)
    kept = {int(each.name[5:]): each for each in (run / "checkpoints").glob("step-*")}
    return steps_of(read_lines(run / "metrics.jsonl")), kept


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
    argv = ["run.py", "eval", "--config", CONFIG, *where, *own]
    with child(name, argv, log=plan.folder / f"{name}.log") as process:
        await_success(process, timeout_s=SIDE_S)
