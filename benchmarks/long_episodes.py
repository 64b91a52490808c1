"""The suite `long-episodes`: 256 episodes of 1,000 turns and 100,000 tokens at once in one actor.

Scheduler, hub, intake with its journal, and actor are processes of their own, with real sockets and
records of the episodes. The engine draws an action from the seed, so that the figures are those of
everything around it. The actor is killed with SIGKILL late in the episodes; another one continues
them. An actor is the process `python -m benchmarks.long_episodes RUN_DIR NUMBER`.
"""

import asyncio
import gc
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from transformers import AutoTokenizer

from actor.formats.renderer import Renderer
from actor.rollout.episode import Turn
from actor.rollout.recording import Recordings
from benchmarks.actor import other_engine
from benchmarks.real_run import check_end, child
from benchmarks.suite import Suite
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.host.child_process import ChildProcess
from common.host.process_settings import ONE_THREAD
from common.log import configure_logging
from common.store.run_dir import RunDir, write_atomically
from common.store.run_start import save_config
from common.wire.messages import Trajectory
from common.wire.security import create_keys
from envhub.catalogue.registry import Registry
from envhub.env import Style
from envhub.envs.rooms import COLOURS, VERB
from learner.journal.journal import read_journal
from scheduler.curriculum.user_functions import ItemDraw
from tools.dashboard.reading.run_source import RunSource
from tools.offline.config import SftSection
from tools.offline.scratch import make_policy, make_tokenizer, save_policy

LONGEST = 3  # Index of the first item of `March` with 500 rooms,
EVERY = 1_000  # and the distance to the next one.
NUM_EPISODES = 256
NUM_TURNS = 1_000
KILL_AT = 900  # Mean turn of the episodes at which the actor is killed.
CONTEXT = 1_024  # Tokens of the policy's context.
GROUP = 8  # Members of a group; `benchmarks.transport` assembles groups of this size.
SAMPLE_S = 0.5
COUNT_S = 0.2
VOCABULARY = 640
START_S = 600.0
EPISODE_S = 6 * 3600.0
MARKS = (0.1, 0.3, 0.9)  # Parts of an episode at which memory and time are reported.
MAX_TOKEN_BYTES = 8.0  # Memory of the actor for each token of its running episodes.
MAX_GROWTH = 1.3  # CPU time of a late turn over that of an early one.
MAX_REPEATED = 2.0  # Turns of an episode that are sampled again after the loss of its actor.
LEGEND = (
    f"{NUM_EPISODES} episodes of {NUM_TURNS:,} turns at once in one actor process, killed at turn\n"
    f"{KILL_AT}; scheduler, hub and intake are real, and the engine draws actions by the seed."
)


def choose_item(draw: ItemDraw, cfg: Any) -> tuple[str, int]:
    """Return an item of `March` with 500 rooms, as `curriculum.kind` asks for one."""
    return "rooms/March", LONGEST + EVERY * draw.number


class SeededActions:
    """Draws an action from the seed, in place of an engine."""

    frozen_s = 0.0
    version = 0

    def __init__(self, renderer: Renderer, *, attempt: int, hold_at: int) -> None:
        """Count the turns of one attempt at each episode.

        Args:
            hold_at: turn at which episodes wait for the end of the actor; 0: none.
        """
        encode = renderer.tokenizer.encode
        end = renderer.end_of_turn_ids[0]
        self._answers = [[*encode(f"{VERB} {colour} closed door 1"), end] for colour in COLOURS]
        self._hold_at = hold_at
        self._turns: Counter[str] = Counter()  # Turns by episode.
        self._attempt = str(attempt)
        self.num_turns = 0
        self.longest = 0  # Tokens of the longest prompt.

    async def generate(
        self, prompt_ids: Sequence[int], *, request_id: str, seed: int, **_: Any
    ) -> Turn:
        """Sample a turn. Arguments are as of the engine."""
        episode, attempt = request_id.rsplit(":", 2)[:2]
        if self._hold_at and self._turns[episode] >= self._hold_at:
            await asyncio.Event().wait()
        self._turns[episode] += 1
        self.num_turns += attempt == self._attempt
        self.longest = max(self.longest, len(prompt_ids))
        draw = random.Random(seed)
        token_ids = draw.choice(self._answers)
        await asyncio.sleep(0)
        logprobs = [-draw.random() for _ in token_ids]
        versions = [0] * len(token_ids)
        return Turn(token_ids, logprobs, versions, is_stopped=True, num_prompt=len(prompt_ids))


async def play(cfg: RunConfig, run_dir: RunDir, number: int, hold_at: int) -> None:
    """Play until SIGTERM. A file has the number of turns of attempt `number`."""
    renderer = Renderer(AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True))
    engine = SeededActions(renderer, attempt=number, hold_at=hold_at)
    name = f"actor-{number}"
    await other_engine.play(
        cfg,
        run_dir,
        name=name,
        life=f"life-{number}",
        engine=engine,
        renderer=renderer,
        start_s=START_S,
        recordings=Recordings(run_dir.episodes),
        others=[_count(run_dir, name, engine)],
    )


async def _count(run_dir: RunDir, name: str, engine: SeededActions) -> None:
    """Append the turns so far, the longest prompt and the longest delay of this loop to a file."""
    path = run_dir.root / f"{name}.turns"
    longest_s = 0.0
    while True:
        asked = time.monotonic()
        await asyncio.sleep(COUNT_S)
        longest_s = max(longest_s, time.monotonic() - asked - COUNT_S)
        write_atomically(path, f"{engine.num_turns} {engine.longest} {longest_s}")


def main(folder: str, number: str, hold_at: str) -> None:
    """Run as one actor of a run."""
    gc.set_threshold(10_000)  # `run.py` sets the same threshold for every role.
    run_dir = RunDir(root=Path(folder))
    cfg = load_config(str(run_dir.config), [])
    configure_logging(f"actor-{number}", cfg.log.level)
    uvloop.run(play(cfg, run_dir, int(number), int(hold_at)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSample:
    """The state of all roles at one time."""

    turn: float  # Turns that the engine sampled, for each episode.
    cpu_s: dict[str, float]  # CPU seconds so far, by role.
    kernel_s: dict[str, float]  # The part of them that the kernel used.
    rss_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongEpisodes:
    """The course of all episodes up to the last acknowledgement."""

    samples: list[RoleSample]  # Taken while the first actor runs.
    num_sampled: int  # Turns of both engines.
    longest_prompt: int  # Tokens.
    blocked_s: float  # The longest delay of the event loop of the second actor.
    continue_s: float  # Seconds from the start of the second actor to its first new turn.
    ledger: dict[str, int]
    episodes: list[Trajectory]  # Those of the killed actor.
    journal_bytes: int
    rss_at_end: dict[str, int]
    page_s: dict[str, float]  # CPU seconds of the dashboard's pages.

    def cpu_of_turn(self, role: str, first: float, last: float) -> float:
        """Return the CPU seconds of a role for one turn of one episode, between two turns."""
        early, late = (self.near(turn) for turn in (first, last))
        num = (late.turn - early.turn) * len(self.episodes)
        return (late.cpu_s[role] - early.cpu_s[role]) / num

    def kernel_share(self, role: str, first: float, last: float) -> float:
        """Return the kernel's share of a role's CPU time between two turns."""
        early, late = (self.near(turn) for turn in (first, last))
        spent_s = late.cpu_s[role] - early.cpu_s[role]
        return (late.kernel_s[role] - early.kernel_s[role]) / spent_s

    def near(self, turn: float) -> RoleSample:
        """Return the sample nearest to a turn."""
        return min(self.samples, key=lambda sample: abs(sample.turn - turn))


def prepare_run(folder: Path, *, num_episodes: int, num_turns: int) -> RunDir:
    """Write configuration, keys and tokenizer of a run that trains nothing."""
    policy = folder / "policy"
    env = Registry(["rooms"]).spec("rooms").make(Style.COMPACT)
    pages = [env.reset(f"March-train-{LONGEST + EVERY * i}", 0) for i in range(40)]
    texts = [*pages, *(f"{VERB} {colour} closed door 1" for colour in COLOURS)]
    tokenizer = make_tokenizer(texts, vocab_size=VOCABULARY)
    sizes = SftSection(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
    model = make_policy(sizes, tokenizer, seed=0)
    model.config.prompt_style = Style.COMPACT.value
    save_policy(policy, model, tokenizer)
    overrides = (
        f"run.dir={folder}",
        "run.name=r",
        f"model.path={policy}",
        "train.num_steps=1000000",
        "tasks=[{env: rooms, subset: March}]",
        "curriculum.kind=benchmarks.long_episodes:choose_item",
        "eval.before=false",
        "eval.after=false",
        "algorithm.filter_zero_variance=false",
        "horizon.kind=fixed",
        f"horizon.stages=[{num_turns}]",
        f"groups.size={GROUP}",
        f"groups.per_step={num_episodes // GROUP}",
        "scheduler.gate_margin=0",
        f"envhub.capacity={2 * num_episodes}",
        f"envhub.session_idle_s={EPISODE_S}",
        "actor.env_timeout_s=300",
        f"actor.episode_timeout_s={EPISODE_S}",
        f"actor.max_concurrent={num_episodes}",
        "actor.adapt_concurrency=false",
        "actor.context=window",
        "actor.context_turns=2",
        f"actor.max_model_len={CONTEXT}",
        "actor.max_turn_tokens=8",
        f"learner.max_tokens_per_microbatch={CONTEXT}",
    )
    run_dir = RunDir(root=folder / "r")
    create_keys(run_dir.keys)
    save_config(load_config("quickstart", overrides), run_dir.config)
    return run_dir


def measure(
    folder: Path,
    *,
    num_episodes: int = NUM_EPISODES,
    num_turns: int = NUM_TURNS,
    kill_at: int = KILL_AT,
) -> LongEpisodes:
    """Play `num_episodes` at once, kill their actor at turn `kill_at`, and continue in another."""
    run_dir = prepare_run(folder, num_episodes=num_episodes, num_turns=num_turns)
    with ExitStack() as children:

        def start(name: str, *argv: str) -> ChildProcess:
            """Start one role as a process."""
            log = folder / f"{name}.txt"
            return children.enter_context(child(name, [*argv], log=log, env=ONE_THREAD))

        where = (f"run.dir={folder}", f"run.name={run_dir.root.name}")
        hub = start("envhub", "run.py", "envhub", *where)
        scheduler = start("scheduler", "run.py", "scheduler", *where)
        scheduler.wait_until((run_dir.addresses / "scheduler").exists, timeout_s=START_S)
        intake = start("intake", "-m", "benchmarks.transport", "intake", str(run_dir.root))
        roles = {"hub": hub, "scheduler": scheduler, "intake": intake}
        command = ("-m", "benchmarks.long_episodes", str(run_dir.root))
        roles["actor"] = start("actor-0", *command, "0", str((kill_at + num_turns) // 2))
        samples: list[RoleSample] = []

        def has_reached(turn: float) -> bool:
            samples.append(_sample(run_dir, roles, num_episodes=num_episodes))
            return samples[-1].turn >= turn

        _await(lambda: has_reached(kill_at), roles)
        os.kill(roles.pop("actor").pid, signal.SIGKILL)
        num_killed, longest, _ = _counted(run_dir, "actor-0")
        # An earlier start would give new episodes to the next actor.
        _await(lambda: _has_lost_actor(run_dir), roles)
        roles["actor"] = start("actor-1", *command, "1", "0")
        started = time.monotonic()
        _await(lambda: _counted(run_dir, "actor-1")[0] > 0, roles)
        continue_s = time.monotonic() - started
        _await(lambda: _num_ended(run_dir, num_episodes) == num_episodes, roles)
        num_after, longest_after, blocked_s = _counted(run_dir, "actor-1")
        at_end = _sample(run_dir, roles, num_episodes=num_episodes)
        arrived = [trajectory for _, trajectory in read_journal(run_dir.journal)]
        return LongEpisodes(
            samples=samples,
            num_sampled=num_killed + num_after,
            longest_prompt=max(longest, longest_after),
            blocked_s=blocked_s,
            continue_s=continue_s,
            ledger=_ledger(run_dir),
            # The scheduler issues others when these have ended.
            episodes=[trajectory for trajectory in arrived if trajectory.attempt],
            journal_bytes=sum(path.stat().st_size for path in run_dir.journal.iterdir()),
            rss_at_end=at_end.rss_bytes,
            page_s=_read_pages(run_dir),
        )


def _read_pages(run_dir: RunDir) -> dict[str, float]:
    """Return the CPU seconds of the dashboard for the index, an episode, a replay and a group."""
    source = RunSource(run_dir.root, name=run_dir.root.name)
    took_s: dict[str, float] = {}

    def read(name: str, page: Callable[[], object]) -> None:
        started = time.process_time()
        page()
        took_s[name] = time.process_time() - started

    read("index", lambda: [None for _ in iter(source.refresh, False)])
    first = source.rows.ids[0]
    read("episode", lambda: source.episode(first))
    read("replay", lambda: source.recorded(first))
    read("group", lambda: source.group(first.rpartition("/")[0]))
    return took_s


def _await(happened: Callable[[], bool], roles: dict[str, ChildProcess]) -> None:
    """Wait for an event while all roles run. Raises: LongstrideError: a role failed; no event."""
    deadline = time.monotonic() + EPISODE_S
    while not happened():
        for role in roles.values():
            check_end(role)
        if time.monotonic() > deadline:
            raise LongstrideError("the episodes have not ended in time")
        time.sleep(SAMPLE_S)


def _counted(run_dir: RunDir, name: str) -> tuple[int, int, float]:
    """Return an actor's turns, its longest prompt, and the longest delay of its event loop."""
    path = run_dir.root / f"{name}.turns"
    words = path.read_text(encoding="utf-8").split() if path.exists() else ["0"] * 3
    return int(words[0]), int(words[1]), float(words[2])


def _sample(run_dir: RunDir, roles: dict[str, ChildProcess], *, num_episodes: int) -> RoleSample:
    """Measure all roles, with their child processes."""
    turn = _counted(run_dir, "actor-0")[0] / num_episodes
    cpu_s: dict[str, float] = {}
    kernel_s: dict[str, float] = {}
    rss_bytes: dict[str, int] = {}
    for name, role in roles.items():
        process = psutil.Process(role.pid)
        family = [process, *process.children(recursive=True)]
        times = [member.cpu_times() for member in family]
        cpu_s[name] = sum(member.user + member.system for member in times)
        kernel_s[name] = sum(member.system for member in times)
        rss_bytes[name] = sum(member.memory_info().rss for member in family)
    return RoleSample(turn=turn, cpu_s=cpu_s, kernel_s=kernel_s, rss_bytes=rss_bytes)


def _has_lost_actor(run_dir: RunDir) -> bool:
    """Return whether the scheduler has reissued the episodes of the killed actor."""
    status = json.loads(run_dir.status.read_text(encoding="utf-8"))
    return any(actor["is_dead"] for actor in status["actors"])


def _num_ended(run_dir: RunDir, num_episodes: int) -> int:
    """Return how many of the first episodes have an outcome. The second actor plays others, too."""
    if not run_dir.outcomes.exists():
        return 0
    with run_dir.outcomes.open(encoding="utf-8") as lines:
        names = [json.loads(line)[0] for line in lines if line.endswith("\n")]
    groups = [int(name.partition("/")[0].removeprefix("g")) for name in names]
    return sum(group < num_episodes // GROUP for group in groups)


def _ledger(run_dir: RunDir) -> dict[str, int]:
    """Return the counts of the scheduler's ledger; {} before the first step."""
    if not run_dir.ledger.exists():
        return {}
    return json.loads(run_dir.ledger.read_text(encoding="utf-8"))


def run_suite(suite: Suite) -> None:
    """Measure once, in about half an hour of two cores."""
    suite.title(LEGEND)
    with suite.check("long episodes") as folder:
        report(suite, measure(folder), num_turns=NUM_TURNS, kill_at=KILL_AT)


def report(suite: Suite, played: LongEpisodes, *, num_turns: int, kill_at: int) -> None:
    """Add the figures of the episodes, with their bounds."""
    num = len(played.episodes)
    tokens = statistics.fmean(len(each.token_ids) for each in played.episodes)
    suite.figure("episodes", num, "", f"{tokens:,.0f} tokens each")
    early = (0.1 * num_turns, 0.3 * num_turns)
    late = (0.7 * num_turns, 0.9 * num_turns)
    for role in ("actor", "hub"):
        before = played.cpu_of_turn(role, *early)
        after = played.cpu_of_turn(role, *late)
        shares = (played.kernel_share(role, *part) for part in (early, late))
        note = "in the kernel early, late: " + ", ".join(f"{share:.2f}" for share in shares)
        suite.figure(f"{role}: CPU of a turn, early", 1e6 * before, "us", note)
        suite.at_most(f"{role}: late over early turn", after / before, "", MAX_GROWTH)
    for role in ("actor", "hub", "intake", "scheduler"):
        sizes = [played.near(mark * num_turns).rss_bytes[role] / 2**20 for mark in MARKS]
        note = ", ".join(f"{size:,.0f}" for size in sizes)
        suite.figure(
            f"{role}: memory at turn {kill_at}", sizes[-1], "MiB", f"at 10, 30, 90 %: {note}"
        )
    first, last = (played.near(mark * num_turns) for mark in (MARKS[0], MARKS[-1]))
    grown = last.rss_bytes["actor"] - first.rss_bytes["actor"]
    num_added = num * tokens * (last.turn - first.turn) / num_turns
    suite.at_most("actor: memory of a token", grown / num_added, "B", MAX_TOKEN_BYTES)
    suite.figure("intake: memory at the end", played.rss_at_end["intake"] / 2**20, "MiB")
    suite.figure("journal", played.journal_bytes / 2**20, "MiB")
    suite.at_most("longest prompt", played.longest_prompt, "tokens", CONTEXT)
    repeated = played.num_sampled / num - num_turns
    suite.at_most("turns sampled again", repeated, "for each episode", MAX_REPEATED)
    suite.figure("the next actor begins to sample after", played.continue_s, "s")
    suite.figure("its event loop was blocked for at most", played.blocked_s, "s")
    for name, took_s in played.page_s.items():
        suite.figure(f"dashboard: {name}", 1e3 * took_s, "ms")
    lost = sum(played.ledger.get(name, 0) for name in ("failed", "stale"))
    suite.at_most("episodes failed or stale", lost, "", 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
