"""The command `recompute`: repeats the training of a run from its recorded data."""

import json
import resource
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.repository import ROOT, git_revision
from common.store.run_dir import RunDir, write_json
from common.text import counted
from common.user_code import changed_functions, digests_of
from learner.algorithms.user_functions import functions_of
from learner.objective.description import summary_lines
from learner.policy.model import pick_device
from learner.recovery.checksums import differences, machine_facts
from learner.training.digests import first_difference
from tools.cli.command_line import ParsedCommand
from tools.recompute.plan import EpisodesMissing, Plan, episodes_of, make_plan
from tools.recompute.rebuild import (
    EpisodeFilter,
    Rebuilt,
    Recomputation,
    RecomputedBatch,
    RecordedResults,
    header,
    split_options,
)

USAGE = "recompute RUN [--steps a:b] [--json FILE] [key=value ...]"
LOG_EVERY_S = 30.0


def recompute(request: ParsedCommand) -> int:
    """Recompute a run; return the exit code: 1 if a step differs or cannot be read.

    Raises: ConfigError: no such run or steps, pruned data, or an override without effect.
    """
    words = [word for word in request.overrides if not word.startswith("run.dir=")]
    if not words or "=" in words[0] or request.config is not None:
        raise ConfigError(f"usage: run.py {USAGE}")
    setting = next((w for w in request.overrides if w.startswith("run.dir=")), "run.dir=runs")
    folder = ROOT / setting.removeprefix("run.dir=") / words[0]
    run_dir = RunDir(root=folder if folder.exists() else Path(words[0]))
    if not run_dir.root.is_dir():
        raise ConfigError(f"{words[0]}: there is no such run directory ({folder})")
    overrides, only = split_options(words[1:])
    plan = make_plan(run_dir, request.steps)
    num_skipped = sum(step.is_skipped for step in plan.steps)
    num_starts = len({id(plan.start_of(step)) for step in plan.steps})
    print(
        f"{run_dir.root.name}: steps {plan.first} to {plan.last}, recomputed from {plan.origin}"
        f" (step {plan.version}): {counted(len(plan.steps), 'batch', 'batches')}, {num_skipped} of"
        f" them skipped. The run computed them in {counted(num_starts, 'start')} of the learner."
    )
    path = Path(request.json or run_dir.root / "recompute.json")
    if overrides or only != EpisodeFilter():
        return _Counterfactual(plan, overrides, only).run(path, is_dry=request.is_dry)
    with Recomputation(plan, [], is_counterfactual=False) as again:
        return 0 if request.is_dry else _Check(plan).run(again, path)


class _Check:
    """Compares the recomputed batches with the run's checksums, batch by batch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_equal = self._num_unknown = 0
        self.problem = ""
        self.step: int | None = None  # The first step that differs.
        self._logged_at = time.monotonic()

    def run(self, again: Recomputation, path: Path) -> int:
        """Recompute the plan up to the first step that differs; return the exit code."""
        episodes = episodes_of(self._plan)
        try:
            self.begin(again.begin())
            if not self.problem:
                for redone in again.run(episodes, EpisodeFilter(), has_scores=False):
                    if not self.take(redone):
                        break
        except EpisodesMissing as error:
            self.step = error.step.version
            self.problem = f"batch: {error}"
        self.finish(episodes.damage)
        result: dict[str, Any] = {
            "first": self._plan.first,
            "last": self._plan.last,
            "equal_checksums": self._num_equal,
            "without_checksum": self._num_unknown,
            "first_difference": {"step": self.step, "what": self.problem} if self.problem else None,
            "cpu_s": _cpu_s(),
            "learner_cpu_s": self._plan.record.learner_cpu_s(),
        }
        write_json(path, result)
        return 1 if self.problem else 0

    def begin(self, rebuilt: Rebuilt) -> None:
        """Report differences of machine and code, and check the initial weights."""
        plan = self._plan
        start = plan.start_of(plan.steps[0])
        now = machine_facts(pick_device(rebuilt.cfg.learner.device))
        for line in differences(start.machine, now):
            print(f"this machine differs from the run's, so rounding may differ: {line}")
        functions = digests_of(functions_of(rebuilt.cfg.algorithm))
        for line in changed_functions(start.functions, functions):
            print(f"{line}, so the numbers may differ")
        code = git_revision()
        if start.code != code:
            was = start.code or "unknown"
            print(f"the code differs from the run's: was {was}, is {code or 'unknown'}")
        weights, frozen = rebuilt.trainer.checksums()
        recorded = {each.version: each for each in plan.record.starts}.get(plan.version)
        lines = plan.record.lines.items()
        noted = [line for (version, _), line in lines if version == plan.version]
        expected = recorded.weights if recorded else noted[-1].digests.weights if noted else weights
        is_alike = recorded is not None or self._is_comparable(noted[-1:], rebuilt)
        if is_alike and weights != expected:
            self.step = plan.version
            where = rebuilt.cfg.model.path if plan.checkpoint is None else plan.checkpoint
            self.problem = f"weights: {where} does not have the weights of the run"
        elif recorded is not None and frozen != recorded.frozen:
            self.step = plan.version
            where = rebuilt.cfg.model.path
            self.problem = f"weights: the frozen weights ({where}, or the reference) differ"
        self._num_equal += is_alike and not self.problem

    def _is_comparable(self, noted: list[Any], rebuilt: Rebuilt) -> bool:
        """Return whether the run had as many ranks as this learner: each has its own digests."""
        num_ranks = rebuilt.cfg.learner.num_ranks
        starts = self._plan.record.starts
        return any(
            starts[line.start].settings["learner"]["num_ranks"] == num_ranks for line in noted
        )

    def take(self, redone: RecomputedBatch) -> bool:
        """Compare one batch; return whether to continue."""
        step = redone.step
        line = self._plan.record.lines.get((step.version, step.number))
        if line is None or redone.digests is None:
            self._num_unknown += 1
            return True
        names = [name for ids in step.groups for name in ids]
        self.problem = first_difference(line.digests, redone.digests, names)
        if self.problem:
            self.step = step.version
            return False
        self._num_equal += not step.is_skipped
        if time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            print(f"step {step.version}: all steps are equal so far")
        return True

    def finish(self, damage: list[str]) -> None:
        """Report the result."""
        if self.problem:
            print(f"step {self.step} differs: {self.problem}")
            return
        for text in damage[:3]:
            print(f"the journal is damaged, but not in episodes of these steps: {text}")
        if self._num_unknown:
            print(
                f"{counted(self._num_unknown, 'batch was', 'batches were')} not compared, because"
                " the run has no checksum of them"
            )
        learner_s = self._plan.record.learner_cpu_s()
        print(
            f"equal: {'all ' * (self._num_equal > 1)}{counted(self._num_equal, 'checksum')} of"
            f" weights, versions {self._plan.version} to {self._plan.last}. Recomputing took"
            f" {_cpu_s():.1f} CPU-seconds, the whole learner {learner_s:.1f}."
        )


class _Counterfactual:
    """Recomputes the run's own learner, and then a learner with other settings on the same data."""

    def __init__(self, plan: Plan, overrides: list[str], only: EpisodeFilter) -> None:
        self._plan = plan
        self._overrides = overrides
        self._only = only

    def run(self, path: Path, *, is_dry: bool) -> int:
        """Print the table and write it as JSON; return the exit code."""
        plan = self._plan
        with Recomputation(plan, self._overrides, is_counterfactual=True) as other:
            for line in summary_lines(other.cfg.algorithm, other.cfg.learner):
                print(line)
            if is_dry:
                return 0
            recorded = RecordedResults()
            try:
                if problem := self._compute_recorded(recorded):
                    print(f"the recorded steps are not reproduced bit for bit: {problem}")
                print(header())
                rows: list[dict[str, Any]] = []
                batches = other.run(episodes_of(plan), self._only, has_scores=True)
                for row in recorded.compare(batches, first=plan.first):
                    print(row.text())
                    rows.append(row.plain)
            except EpisodesMissing as error:
                print(f"step {error.step.version} cannot be recomputed: {error}")
                return 1
            finally:
                recorded.close()
        if rows and all(row["policy"] == "recorded" for row in rows) and len(rows) > 1:
            print("the overrides change nothing on this data")
        only = asdict(self._only) | {"dropped": sorted(self._only.dropped)}
        result = {"overrides": self._overrides, "only": only, "origin": plan.origin, "rows": rows}
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")
        return 0

    def _compute_recorded(self, recorded: RecordedResults) -> str:
        """Recompute the batches with the run's own settings; return the first difference."""
        check = _Check(self._plan)
        problem = ""
        with Recomputation(self._plan, [], is_counterfactual=False) as again:
            check.begin(again.begin())
            for redone in again.run(episodes_of(self._plan), self._only, has_scores=True):
                recorded.add(redone)
                if not check.problem and not check.take(redone):
                    problem = f"step {check.step}: {check.problem}"
        return problem or check.problem


def _cpu_s() -> float:
    """Return the CPU-seconds of this process and of the ranks that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
