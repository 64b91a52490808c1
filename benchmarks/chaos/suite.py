"""The suite `chaos`: faults on every role while the quickstart trains, and their cost."""

import logging
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.chaos.clock import make_clock
from benchmarks.chaos.faults import (
    ALL_FAULTS,
    FAULT_S,
    Fault,
    FaultType,
    FaultyRun,
    NotPossible,
    deal,
)
from benchmarks.chaos.machine import isolate, release
from benchmarks.chaos.watch import StepObserver, read_json
from benchmarks.real_run import TRAINING_ALONE, Role, await_success, check_end, read_lines, running
from benchmarks.suite import Suite
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.store.run_dir import RunDir

logger = logging.getLogger(__name__)

POLL_S = 0.05
FIRST_STEPS = 3  # Steps before the first fault.
MAX_STEP_S = 180.0  # Limit of the time to the next step. A run that exceeds it counts as hanging.
START_S = 300.0
MINUTE_S = 60.0
MIN_ETTR = 0.85  # Minimum ETTR at one fault a minute.
MEDIAN_S = {
    Role.SCHEDULER: 5.0,
    Role.HUB: 5.0,
    Role.LEARNER: 15.0,
    Role.RANK: 30.0,  # Each loss of a rank is a new start of the learner with all ranks.
    Role.ACTOR: 15.0,
}
P95_FACTOR = 3.0
LEGEND = (
    "Recovery: from the end of a fault until the role does its part again; a learner when it\n"
    "makes a step, an actor when it samples tokens, with its engine's own start. ETTR: the\n"
    "share of the time that the steps take undisturbed, were there one fault a minute."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignSize:
    """The extent of a campaign."""

    config: str
    num_steps: int
    every_s: float  # Seconds between two faults, unless the recovery takes longer.
    lasts_s: float = FAULT_S
    faults: tuple[Fault, ...] = ALL_FAULTS
    settings: tuple[str, ...] = TRAINING_ALONE


USUAL = CampaignSize(
    config="quickstart",
    num_steps=420,
    every_s=4.0,
    settings=tuple(each for each in TRAINING_ALONE if each != "eval.after=false"),
)
# Updates this small change few of the weights' 16 bits, as those of a large policy.
SMALL_STEPS = ("learner.optimizer=adamw", "learner.lr=1e-5")
TWO_RANKS = (*TRAINING_ALONE, "learner.num_ranks=2")
DELTA = CampaignSize(
    config="quickstart",
    num_steps=50,
    every_s=4.0,
    settings=(
        *TWO_RANKS,
        *SMALL_STEPS,
        "learner.publish=delta",
        "learner.weights_transport=gloo",  # Memory that engines map has whole versions.
        "model.dtype=bfloat16",
    ),
)
ADAPTERS = CampaignSize(
    config="quickstart",
    num_steps=50,
    every_s=4.0,
    settings=(*TWO_RANKS, "learner.optimizer=adamw", "learner.lora.rank=8"),
)
SHORT = CampaignSize(
    config="smoke",
    num_steps=100,  # On a slow machine faults take longer, while steps continue.
    every_s=3.0,
    lasts_s=2.0,
    faults=(
        *(
            Fault(FaultType.KILL, role)
            for role in (Role.SCHEDULER, Role.LEARNER, Role.HUB, Role.ACTOR)
        ),
        *(Fault(FaultType.RESET, role) for role in (Role.LEARNER, Role.ACTOR)),
        *(Fault(FaultType.CORRUPT, role) for role in (Role.SCHEDULER, Role.LEARNER)),
        Fault(FaultType.STOP, Role.ACTOR),
        Fault(FaultType.DUPLICATE, Role.LEARNER),
        *(Fault(kind) for kind in (FaultType.DISK_FULL, FaultType.DROPPED, FaultType.CLOCK)),
    ),
)


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """One injected fault, in seconds."""

    fault: Fault
    began_s: float  # Monotonic time.
    ended_s: float  # Monotonic time of the end of the fault.
    back_s: float = math.nan  # Time from `ended_s` until the role works again.
    step_s: float = math.nan  # Time from `ended_s` until the run's next step.


@dataclass(slots=True, kw_only=True)
class CampaignLog:
    """The faults and steps of one run."""

    injected: list[InjectedFault] = field(default_factory=lambda: [])
    left_out: dict[str, str] = field(default_factory=lambda: {})  # Reason, by fault.
    step_times: list[float] = field(default_factory=lambda: [])  # Monotonic times.

    @property
    def quiet_step_s(self) -> float:
        """The median of seconds between two steps during which no fault was active."""
        pairs = zip(self.step_times, self.step_times[1:], strict=False)
        quiet = [b - a for a, b in pairs if not any(self._is_about(s, a, b) for s in self.injected)]
        return statistics.median(quiet) if quiet else math.nan

    def _is_about(self, injected: InjectedFault, begin: float, end: float) -> bool:
        """Return whether a fault's effect overlaps an interval of the run."""
        step_s = 0.0 if math.isnan(injected.step_s) else injected.step_s
        return injected.began_s <= end and begin <= injected.ended_s + step_s

    @property
    def lost_s(self) -> float:
        """The mean of seconds lost per fault."""
        took_s = self.step_times[-1] - self.step_times[0]
        wanted_s = (len(self.step_times) - 1) * self.quiet_step_s
        return (took_s - wanted_s) / max(1, len(self.injected))


def run_suite(suite: Suite) -> None:
    """Inject a fault into a quickstart of 420 steps every four seconds, in half an hour."""
    measure(suite, USUAL)


def run_delta(suite: Suite) -> None:
    """Inject the same faults while two ranks of the learner send changes of versions."""
    measure(suite, DELTA)


def run_adapters(suite: Suite) -> None:
    """Inject the same faults while two ranks of the learner train adapters."""
    measure(suite, ADAPTERS)


def run_short(suite: Suite) -> None:
    """Inject faults into a small run for two minutes."""
    measure(suite, SHORT)


def measure(suite: Suite, size: CampaignSize) -> None:
    """Run a training, inject faults and report the results."""
    suite.title(LEGEND)
    with suite.check("chaos") as folder:
        reason = isolate(folder)
        if reason:
            suite.title(f"left out: the network's and the disk's faults, {reason}")
        try:
            _measure(suite, size, folder, has_machine=not reason)
        finally:
            if not reason:
                release(folder)


def _measure(suite: Suite, size: CampaignSize, folder: Path, *, has_machine: bool) -> None:
    """Run with faults in `folder`, which has a small disk."""
    run_dir = RunDir(root=folder / "run")
    clock = make_clock(folder)
    settings = (*size.settings, f"train.num_steps={size.num_steps}")
    env = clock.environment if clock else {}
    with running("run", settings, folder=folder, config=size.config, env=env) as child:
        scene = FaultyRun(
            supervisor_pid=child.pid,
            run_dir=run_dir,
            disk=folder if has_machine else None,
            clock=clock,
            lasts_s=size.lasts_s,
        )
        campaign = disturb(child, scene, size, seed=suite.seed)
    add_recovery(suite, campaign)
    add_end(suite, run_dir, num_steps=size.num_steps, campaign=campaign)


def disturb(child: ChildProcess, scene: FaultyRun, size: CampaignSize, *, seed: int) -> CampaignLog:
    """Inject faults until the run has ended. Raises: LongstrideError: it failed, or hangs."""
    campaign = CampaignLog()
    watch = StepObserver(scene.run_dir)
    _wait(child, watch, FIRST_STEPS, START_S)
    for fault in deal(size.faults, seed=seed):
        began_s = time.monotonic()
        if child.poll() is not None or watch.poll_steps() >= size.num_steps - FIRST_STEPS:
            break
        try:
            scene.strike(fault)
        except NotPossible as error:
            campaign.left_out[fault.name] = str(error)
            if len(campaign.left_out) == len(size.faults):
                break
            continue
        injected = InjectedFault(fault=fault, began_s=began_s, ended_s=time.monotonic())
        campaign.injected.append(injected)
        logger.info("fault=%s step=%d", fault.name, watch.poll_steps())
        _recover(child, watch, injected)
        logger.info(
            "fault=%s back_s=%.1f step_s=%.1f", fault.name, injected.back_s, injected.step_s
        )
        while child.poll() is None and time.monotonic() < began_s + size.every_s:
            watch.poll_steps()
            time.sleep(POLL_S)
    _wait(child, watch, size.num_steps, START_S)
    campaign.step_times = watch.step_times
    await_success(child, timeout_s=START_S)
    return campaign


def _recover(child: ChildProcess, watch: StepObserver, injected: InjectedFault) -> None:
    """Wait until the role works again and the run has made a step, and record both times."""
    num_steps = watch.poll_steps()
    wall_s = time.time()
    role = injected.fault.role
    while math.isnan(injected.back_s) or math.isnan(injected.step_s):
        passed_s = time.monotonic() - injected.ended_s
        if math.isnan(injected.step_s) and watch.poll_steps() > num_steps:
            injected.step_s = passed_s
        if math.isnan(injected.back_s) and (
            role is None or watch.is_back(role, since=wall_s, num_steps=num_steps)
        ):
            injected.back_s = passed_s
        if child.poll() is not None:
            check_end(child)
            return  # The run has already ended.
        if passed_s > MAX_STEP_S:
            raise LongstrideError(f"no step within {MAX_STEP_S:g}s after {injected.fault.name}")
        time.sleep(POLL_S)


def _wait(child: ChildProcess, watch: StepObserver, num_steps: int, timeout_s: float) -> None:
    """Wait until a run has made `num_steps` steps, each within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    seen = 0
    while (made := watch.poll_steps()) < num_steps and child.poll() is None:
        if made > seen:
            deadline = time.monotonic() + timeout_s
            seen = made
        if time.monotonic() > deadline:
            raise LongstrideError(f"no step after {made} within {timeout_s:g}s")
        time.sleep(POLL_S)
    check_end(child)


def add_recovery(suite: Suite, campaign: CampaignLog) -> None:
    """Write the recovery times by fault and by role, and the effective training time ratio."""
    by_name: defaultdict[str, list[InjectedFault]] = defaultdict(list)
    by_role: defaultdict[Role, list[float]] = defaultdict(list)
    for each in campaign.injected:
        by_name[each.fault.name].append(each)
        if (role := each.fault.role) is not None and role in MEDIAN_S:
            by_role[role].append(each.back_s)
    for name, all_of_it in sorted(by_name.items()):
        back_s = quantile([s.back_s for s in all_of_it], 0.5)
        step_s = max(s.step_s for s in all_of_it)
        note = f"{len(all_of_it)} times, next step after {step_s:.1f} s at most"
        suite.figure(f"recovery, {name}", back_s, "s", note)
    for role, seconds in sorted(by_role.items()):
        median = MEDIAN_S[role]
        suite.at_most(f"recovery of {role}, median", quantile(seconds, 0.5), "s", median)
        suite.at_most(
            f"recovery of {role}, 95 %", quantile(seconds, 0.95), "s", P95_FACTOR * median
        )
    for name, reason in sorted(campaign.left_out.items()):
        if name not in by_name:
            suite.title(f"left out: {name}, {reason}")
    ettr = 1 - campaign.lost_s / MINUTE_S
    num_faults = len(campaign.injected)
    note = f"{num_faults} faults, each cost {campaign.lost_s:.1f} s; undisturbed steps took"
    suite.at_least(
        "ETTR at one fault a minute", ettr, "", MIN_ETTR, f"{note} {campaign.quiet_step_s:.2f} s"
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not exceeded by the given fraction of the values."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def add_end(suite: Suite, run_dir: RunDir, *, num_steps: int, campaign: CampaignLog) -> None:
    """Write the final ledger: no episode may be lost or trained on twice."""
    ledger = read_json(run_dir.ledger)
    parts = ("trained", "filtered", "stale", "failed", "in_flight")
    unaccounted = abs(ledger["issued"] - sum(ledger[part] for part in parts))
    steps = [step for step in read_lines(run_dir.steps) if not step.get("skipped")]
    trained = Counter(name for step in steps for group in step["groups"] for name in group)
    num_twice = sum(times - 1 for times in trained.values())
    log = (run_dir.logs / "learner.log").read_text(errors="replace", encoding="utf-8")
    made = {step["version"] for step in steps}
    suite.at_most("episodes lost", ledger["lost"] + unaccounted, "", 0)
    suite.at_most("episodes trained twice", num_twice, "", 0)
    suite.at_least("faults", len(campaign.injected), "", 1, f"seed {suite.seed}")
    suite.figure("steps wanted", num_steps, "")
    suite.at_least("steps made", len(made), "", num_steps)
    redone = log.count("repeated step=")
    suite.figure("steps repeated from the log", redone, "", "by learners that died")
    issued = max(1, ledger["issued"])
    suite.figure("episodes issued again", ledger["reissued"] / issued, "of all", f"{issued} issued")
    suite.figure("episodes failed", ledger["failed"] / issued, "of all")
    sent = [
        step["publish/bytes"] for step in read_lines(run_dir.metrics) if "publish/bytes" in step
    ]
    if sent:
        note = f"at most {max(sent) / 1e6:.2f} MB"
        suite.figure("sent for a version, median", statistics.median(sent) / 1e6, "MB", note)
    after = read_json(run_dir.root / "report.json").get("after")
    if after:
        suite.figure("held-out success", after["success"], "")
