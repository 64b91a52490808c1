"""A run's directory as a source of displays: its episodes, metrics, state and problems."""

import hashlib
import itertools
import json
import math
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from actor.formats.thoughts import ThoughtForm
from actor.rollout.episode import action_number
from common import segments
from common.config.actor import AgentFormat
from common.config.algorithm import Advantage, Baseline
from common.errors import ConfigError, WireError
from common.formats.answers import read_any
from common.host.lock import is_held
from common.store.run_dir import RunDir, as_map, json_object
from common.wire.messages import EndReason, PolicyKind, Trajectory
from learner.journal.index import IN_FLIGHT, EpisodeIndex, EpisodeRows
from learner.journal.texts import Texts, TokenIdDecoder, segments_of, texts_for, texts_of_run
from learner.recovery.reward_log import read_group_rewards
from tools.dashboard.reading.index_cache import IndexCache
from tools.dashboard.reading.rows import page
from tools.dashboard.run_state import is_part
from tools.dashboard.verdict import ThroughputVerdict, judge

LAST_BYTES = 4096
MAX_POINTS = 1000  # Maximum number of points of a series. Longer series are averaged in bins.
Settled = tuple[str, str, int]  # (outcome, cause, version of the training step or -1)
MAX_ABSENT = 1000  # Maximum number of listed episodes that never arrived.


class LineTail:
    """New lines of a file. Invalid ones are counted; a truncated or replaced file is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""  # Error of the first line that could not be read.
        self.num_bad = 0
        self._offset = 0
        self._num_lines = 0
        self._inode = -1

    def place(self) -> list[Any]:
        """Return the read position as JSON, with a digest of the bytes before it."""
        return [self._offset, self._num_lines, self._inode, self._before(self._offset)]

    def go_to(self, place: list[Any]) -> bool:
        """Continue at a position of `place`; return False if the bytes before it differ."""
        offset, num_lines, inode, before = place
        if self._before(offset) != before:
            return False
        self._offset = offset
        self._num_lines = num_lines
        self._inode = inode
        return True

    def _before(self, offset: int) -> str:
        """Return a digest of the last bytes before an offset, "" without a file."""
        try:
            with self.path.open("rb") as handle:
                handle.seek(max(0, offset - LAST_BYTES))
                return hashlib.sha256(handle.read(min(offset, LAST_BYTES))).hexdigest()
        except OSError:
            return ""

    def is_new(self) -> bool:
        """Reset all state if the file was replaced or is shorter; return whether it was."""
        try:
            stat = self.path.stat()
        except OSError:
            return False
        was_read = self._inode != -1
        is_other = was_read and (stat.st_ino != self._inode or stat.st_size < self._offset)
        if is_other:
            self._offset = 0
            self._num_lines = 0
            self.problem = ""
            self.num_bad = 0
        self._inode = stat.st_ino
        return is_other

    def lines(self) -> Iterator[Any]:
        """Yield the values of new complete lines. An incomplete last line is read later."""
        try:
            handle = self.path.open("rb")
        except OSError:
            return
        with handle:
            handle.seek(self._offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._num_lines += 1
                try:
                    value: Any = json.loads(line)
                except ValueError as error:
                    self.bad(error)
                    continue
                yield value

    def bad(self, error: Exception) -> None:
        """Count an invalid line, and keep the error of the first one."""
        self.num_bad += 1
        where = f"{self.path}: line {self._num_lines} is damaged"
        self.problem = self.problem or f"{where} ({error.__class__.__name__}: {error!s:.80})"


class MetricColumns:
    """Every metric of every step; nan where a step lacks the metric."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.num = 0
        self.columns: dict[str, array[float]] = {}

    def refresh(self) -> bool:
        """Read the new lines; return whether there were any, or the file was replaced."""
        is_other = self._tail.is_new()
        if is_other:  # A restart truncates the steps that it repeats.
            self.num = 0
            self.columns = {}
        before = self.num
        for record in self._tail.lines():
            line = as_map(record)
            if not isinstance(line.get("step"), int | float):
                self._tail.bad(ValueError("not a JSON object with a step"))
                continue
            self._add(line)
        return is_other or self.num > before

    def _add(self, line: dict[str, Any]) -> None:
        """Add a step. `num` grows last, so that concurrent readers get complete steps only."""
        numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
        if new := numbers.keys() - self.columns.keys():
            unknown = array("d", [math.nan]) * self.num
            self.columns = self.columns | {name: unknown[:] for name in numbers if name in new}
        for name, column in self.columns.items():
            column.append(numbers.get(name, math.nan))
        self.num += 1

    @property
    def problem(self) -> str:
        """The problem of the file; "" if there is none."""
        return self._tail.problem

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric; None if there is none."""
        column = self.columns.get(name, ())
        return next((v for v in reversed(column) if not math.isnan(v)), None)

    def tail(self, num_steps: int) -> list[dict[str, float | None]]:
        """Return the newest steps as dicts, like the lines of the file."""
        first = max(0, self.num - num_steps)
        return [
            {n: c[i] for n, c in self.columns.items() if not math.isnan(c[i])}
            for i in range(first, self.num)
        ]

    def series(
        self, names: Iterable[str] | None = None, *, num_steps: int = 0
    ) -> dict[str, list[float | None]]:
        """Return columns of at most `MAX_POINTS` values, each the mean of equally many steps.

        With `num_steps` a value is the mean of as many steps as in a run of that length.
        """
        width = max(1, math.ceil(max(self.num, num_steps) / MAX_POINTS))
        wanted = self.columns if names is None else {*names, "step"}
        return {
            name: [_mean(column[i : i + width]) for i in range(0, self.num, width)]
            for name, column in list(self.columns.items())
            if name in wanted
        }


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean of the known values with six digits."""
    numbers = [value for value in values if not math.isnan(value)]
    return float(f"{sum(numbers) / len(numbers):.6g}") if numbers else None


class OutcomeLog:
    """Sets the outcomes of indexed rows. Outcomes without a row wait until the row appears."""

    def __init__(self, run_dir: RunDir) -> None:
        self._steps = LineTail(run_dir.steps)
        self._outcomes = LineTail(run_dir.outcomes)
        self._waiting: dict[str, Settled] = {}
        self._has_outcomes = run_dir.outcomes.exists

    def refresh(self, rows: EpisodeRows) -> bool:
        """Read the new lines; return whether any outcome was found."""
        self._steps.is_new()
        self._outcomes.is_new()
        here = [each for each in self._waiting if each in rows.row_of]
        for episode_id in here:
            self._settle(rows, episode_id, self._waiting.pop(episode_id))
        num = 0
        for line in self._outcomes.lines():
            try:
                episode_id, outcome, cause, version = line
                trained_at = version if outcome == "trained" else -1
                self._settle(rows, str(episode_id), (str(outcome), str(cause), int(trained_at)))
                num += 1
            except (TypeError, ValueError) as error:
                self._outcomes.bad(error)
        for line in self._steps.lines():
            try:
                if "pruned" in line:
                    continue
                version = -1 if line.get("skipped") else int(line["version"])
                for episode_id, outcome, cause in line["outcomes"]:
                    trained_at = version if outcome == "trained" else -1
                    self._settle(rows, str(episode_id), (str(outcome), str(cause), trained_at))
                    num += 1
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                self._steps.bad(error)
        return num > 0

    def kept(self) -> list[Any] | None:
        """Return the JSON state for `restore`; None if lines are damaged.

        A new log then reads the damaged lines again and reports them.
        """
        if self._steps.problem or self._outcomes.problem:
            return None
        return [self._steps.place(), self._outcomes.place(), self._waiting]

    def restore(self, saved: list[Any]) -> bool:
        """Continue at the position of an earlier log; return False if the files were replaced."""
        steps, outcomes, waiting = saved
        if not (self._steps.go_to(steps) and self._outcomes.go_to(outcomes)):
            self._steps, self._outcomes = LineTail(self._steps.path), LineTail(self._outcomes.path)
            return False
        self._waiting = {name: (each[0], each[1], each[2]) for name, each in waiting.items()}
        return True

    def problems(self, *, has_steps: bool) -> list[str]:
        """Return the problems of the two files as messages."""
        texts = [tail.problem for tail in (self._steps, self._outcomes) if tail.problem]
        if has_steps and not self._has_outcomes():
            texts.append(
                f"{self._outcomes.path} is missing, as in runs of older versions. The outcome of"
                " episodes that were not trained on is unknown: filtered or stale."
            )
        return texts

    def absent(self, outcome: str) -> list[dict[str, str]]:
        """Return the settled episodes that never arrived, the newest first."""
        episodes = [
            {"id": episode_id, "outcome": settled[0], "cause": settled[1]}
            for episode_id, settled in list(self._waiting.items())
            if outcome in ("", settled[0])
        ]
        return episodes[::-1][:MAX_ABSENT]

    def _settle(self, rows: EpisodeRows, episode_id: str, settled: Settled) -> None:
        """Set the outcome of a row, or keep it until the row appears."""
        row = rows.row_of.get(episode_id)
        if row is None:
            self._waiting[episode_id] = settled
            return
        outcome, cause, trained_at = settled
        rows.settle(row, outcome=outcome, cause=cause, trained_at=trained_at)


VERDICT_STEPS = 20  # Number of newest steps in the verdict.
MAX_MEMBERS = 64  # Maximum number of group members shown side by side.
COMPACT = "compact"  # The default `envhub.style` of runs without this key.


class RunSource:
    """One run. Only one thread may call `refresh`; any thread may call the other methods."""

    kind = "run"

    def __init__(self, root: Path, *, name: str, cache: Path | None = None) -> None:
        """Create the readers without I/O; `cache` is the folder of the index cache, or None."""
        self.name = name
        self.path = root
        self.run_dir = RunDir(root=root)
        self.index = EpisodeIndex(self.run_dir.journal)
        self.metrics = MetricColumns(self.run_dir.metrics)
        self._outcomes = OutcomeLog(self.run_dir)
        self._cache = IndexCache(cache, self.run_dir.journal) if cache is not None else None
        self._is_first = True
        self._config: tuple[int, dict[str, Any]] = (-1, {})
        self._texts: Texts | None = None
        self._text_problem = ""
        self._reward_problem = ""
        self._lock = threading.Lock()

    @property
    def rows(self) -> EpisodeRows:
        """The episodes as columns."""
        return self.index.rows

    def refresh(self, *, budget_s: float = 0.2) -> bool:
        """Read new records and lines; return whether the journal has more."""
        with self._lock:
            if self._is_first and self._cache is not None:
                self._restore(self._cache)
            self._is_first = False
            is_more = self.index.refresh(budget_s=budget_s)
            self.metrics.refresh()
            self._outcomes.refresh(self.index.rows)
            index = self.index.kept()
            outcomes = self._outcomes.kept()
            if self._cache is not None and not is_more and index and outcomes:
                beside = {"index": index, "outcomes": outcomes}
                self._cache.save(self.index.rows, beside, reached=index["_number"])
        return is_more

    def _restore(self, cache: IndexCache) -> None:
        """Continue with the index and the outcomes of the cache, if they fit the files."""
        if beside := cache.load(self.index.rows):
            if self._outcomes.restore(beside["outcomes"]):
                self.index.restore(beside["index"])
            else:
                self.index = EpisodeIndex(self.run_dir.journal)

    # --- what it is -----------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the configuration as written, of any product version; {} if there is none."""
        try:
            changed_at = self.run_dir.config.stat().st_mtime_ns
            if changed_at != self._config[0]:
                tree: object = yaml.load(self.run_dir.config.read_bytes(), Loader=yaml.CSafeLoader)
                self._config = changed_at, as_map(tree)
        except (OSError, yaml.YAMLError, ValueError):
            return {}
        return self._config[1]

    def status(self) -> dict[str, Any]:
        """Return the scheduler's last status; {} if there is none, or it is unreadable."""
        return json_object(self.run_dir.status)

    def ledger(self) -> dict[str, Any]:
        """Return the scheduler's last ledger."""
        return json_object(self.run_dir.ledger)

    def problems(self) -> list[str]:
        """Return messages about unreadable files and records."""
        texts = [*self.index.problems]
        if self.index.num_problems > len(texts):
            num_more = self.index.num_problems - len(texts)
            texts.append(f"The journal has more problems, which are not listed: {num_more}.")
        has_steps = self.metrics.num > 0 and self.run_dir.journal.exists()  # `sft` has no episodes.
        texts += self._outcomes.problems(has_steps=has_steps)
        damaged = (self.metrics.problem, self._text_problem, self._reward_problem)
        texts += [text for text in damaged if text]
        if self.run_dir.config.exists() and not self.config():
            texts.append(
                f"{self.run_dir.config} is not a YAML map. The run is shown without its settings."
            )
        return texts

    def state(self) -> str:
        """Return "finished", "running", "stopped", or "starting" before the first step."""
        if self.run_dir.finished.exists():
            return "finished"
        is_running = is_held(self.run_dir.root)
        if is_running:
            return "running" if self.metrics.num else "starting"
        return "stopped"

    def summary(self) -> dict[str, Any]:
        """Return the entry of this run in the list of runs."""
        train = _section(self.config(), "train")
        return {
            "name": self.name,
            "kind": self.kind,
            "state": self.state(),
            "step": int(self.metrics.last("step") or 0),
            "num_steps": None if is_part(self.path) else train.get("num_steps"),
            "success": self.metrics.last("reward/success"),
            "episodes": self.index.rows.num,
            "indexed": round(self.index.progress(), 3),
            "problems": self.problems(),
        }

    def verdict(self) -> ThroughputVerdict:
        """Return the verdict on the limit of the run, from its newest steps."""
        lines = self.metrics.tail(VERDICT_STEPS)
        return judge(lines, self.config(), self.status())

    # --- episodes -------------------------------------------------------------------------------

    def page(self, wanted: Mapping[str, str], *, start: int, num: int) -> dict[str, Any]:
        """Return one page of the matching episodes, and the matching ones that never arrived."""
        episodes = page(self.index.rows, wanted, start=start, num=num)
        is_outcome_only = not any(v for k, v in wanted.items() if k not in ("outcome", "sort"))
        outcome = wanted.get("outcome", "")
        episodes["absent"] = self._outcomes.absent(outcome) if is_outcome_only and outcome else []
        return episodes

    def episode(self, episode_id: str) -> dict[str, Any]:
        """Return one complete episode. Raises: KeyError: unknown; WireError: it is damaged."""
        rows = self.index.rows
        row = rows.row_of[episode_id]
        values = rows.get(row)
        members = self._members(values["group"]) if values["kind"] == "train" else []
        advantages = self._advantages(members)
        return {
            **values,
            "segments": segments_of(self.index.open(row), self.texts()),
            "advantage": advantages.get(episode_id),
            "group_reward": self._group_rewards(values["group"]).get(values["member"]),
            "siblings": [rows.ids[each] for each in members],
            "problems": [self._text_problem] if self._text_problem else [],
        }

    def recorded(self, episode_id: str) -> dict[str, Any]:
        """Return the data to replay an episode. Raises: KeyError, WireError, ConfigError.

        ConfigError: its actions are unknown.
        """
        trajectory = self.index.open(self.index.rows.row_of[episode_id])
        texts = self.texts()
        style = self.style()
        return recorded_of(trajectory, texts, style=style, format=self.format())

    def format(self) -> AgentFormat:
        """Return the answer format of the run's policy."""
        named = _section(self.config(), "actor").get("format")
        return AgentFormat(named) if named in set(AgentFormat) else AgentFormat.PLAIN

    def style(self) -> str:
        """Return the wording style of the run's environments."""
        return str(_section(self.config(), "envhub").get("style") or COMPACT)

    def group(self, group_id: str) -> dict[str, Any]:
        """Return the members of a group with their segments. Raises: KeyError: it is unknown."""
        members = self._members(group_id)
        if not members:
            raise KeyError(group_id)
        # An evaluation group holds many items.
        is_train = self.index.rows.get(members[0])["kind"] == "train"
        advantages = self._advantages(members) if is_train else {}
        rewards = self._group_rewards(group_id)
        texts = self.texts()
        shown: list[dict[str, Any]] = []
        first = None
        for row in members[:MAX_MEMBERS]:
            values = self.index.rows.get(row)
            entry = {**values, "advantage": advantages.get(values["id"])}
            entry["group_reward"] = rewards.get(values["member"])
            try:
                trajectory = self.index.open(row)
                first = first or trajectory
                entry["segments"] = segments_of(trajectory, texts)
                is_first = trajectory is first
                is_alike = is_train and not is_first
                entry["differs"] = first_difference(first, trajectory, texts) if is_alike else None
            except WireError as error:
                entry |= {"segments": [], "differs": None, "problem": str(error)}
            shown.append(entry)
        return {"group": group_id, "members": shown}

    def texts(self) -> Texts:
        """Return the decoder of the run's tokens. Without a tokenizer it shows token ids."""
        if self._texts is None:
            model = str(_section(self.config(), "model").get("path") or "")
            try:
                self._texts = texts_of_run(self.run_dir.tokenizer, model)
            except ConfigError as error:
                self._texts = TokenIdDecoder()
                self._text_problem = (
                    f"Tokens are shown as ids, because the tokenizer is unusable: {error}"
                )
        return self._texts

    def _members(self, group_id: str) -> list[int]:
        """Return the newest row of each member of a group, in the order of members."""
        rows = self.index.rows
        code = rows.names["group"].codes.get(group_id, -1)
        numbers = (rows.column("group") == code).nonzero()[0].tolist()
        newest = [row for row in numbers if rows.row_of[rows.ids[row]] == row]
        return sorted(newest, key=lambda row: int(rows.column("member")[row]))

    def _group_rewards(self, group_id: str) -> dict[int, float]:
        """Return the trained rewards of a group by member; {} if it has no `groups.reward`."""
        try:
            rewards = read_group_rewards(self.run_dir.group_rewards)
        except ConfigError as error:
            self._reward_problem = str(error)
            return {}
        reward = rewards.get(group_id)
        return {} if reward is None else reward.rewards

    def _advantages(self, members: list[int]) -> dict[str, float]:
        """Return each member's advantage as the learner computes it; {} for other algorithms."""
        rows = self.index.rows
        config = self.config()
        algorithm = _section(config, "algorithm")
        if not has_group_advantages(algorithm, _section(config, "groups")):
            return {}
        penalty = float(algorithm.get("invalid_action_penalty") or 0.0)
        worth: dict[str, float] = {}
        for row in members:
            episode = rows.get(row)
            if episode["outcome"] == "failed" or episode["end"] in FAILURES:
                continue
            cost = penalty * episode["invalid"] / max(1, episode["turns"])
            worth[episode["id"]] = episode["reward"] - cost
        is_grpo = algorithm.get("advantage", Advantage.GRPO) == Advantage.GRPO
        values = group_advantages(
            [*worth.values()],
            baseline=str((is_grpo and algorithm.get("baseline")) or Baseline.LEAVE_ONE_OUT),
            normalize_std=is_grpo and bool(algorithm.get("normalize_std")),
        )
        return dict(zip(worth, values, strict=True)) if values else {}

    def flow(self) -> dict[str, Any]:
        """Return the ledger and the number of journal episodes of each outcome."""
        rows = self.index.rows
        # The reading thread may append rows at the same time.
        num = rows.num
        texts = rows.names["outcome"].texts
        is_train = rows.column("kind")[:num] == rows.names["kind"].codes.get("train", -1)
        codes = rows.column("outcome")[:num][is_train]
        counts = {text: int((codes == code).sum()) for code, text in enumerate(texts)}
        return {"ledger": self.ledger(), "here": counts, "in_flight": IN_FLIGHT}


# Ends of episodes that are no members of a group.
FAILURES = {each.value for each in EndReason if each.is_infrastructure_failure}


def has_group_advantages(algorithm: Mapping[str, Any], groups: Mapping[str, Any]) -> bool:
    """Return whether the rewards in the journal determine the advantages, one for each episode.

    Args:
        algorithm, groups: sections of a stored configuration, of any product version.
    """
    usual = {
        "normalize_per_env": False,
        "reward_level": "episode",
        "state_credit": "none",
        "turn_discount": 1.0,
    }
    if any(algorithm.get(name, value) != value for name, value in usual.items()):
        return False
    if algorithm.get("invalid_action_penalty") and (
        algorithm.get("invalid_action_level", "episode") != "episode"
    ):
        return False
    teacher = as_map(algorithm.get("teacher"))
    is_taught = bool(teacher.get("path") or teacher.get("url"))
    is_of_group = algorithm.get("advantage", Advantage.GRPO) in (Advantage.GRPO, Advantage.RLOO)
    return is_of_group and not (is_taught or groups.get("reward") or groups.get("forks"))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a stored configuration; {} without it."""
    return as_map(config.get(name))


STD_EPSILON = 1e-6  # The same value as in the learner.
NUM_SHOWN = 24  # Number of tokens shown from the first difference on.


def recorded_of(
    trajectory: Trajectory, texts: Texts, *, style: str, format: AgentFormat = AgentFormat.PLAIN
) -> dict[str, Any]:
    """Return the data to replay an episode (`RecordedEpisode`).

    Args:
        style, format: `envhub.style` and `actor.format` of the run.

    Raises: ConfigError: its actions are unknown.
    """
    t = trajectory
    is_model = t.policy is PolicyKind.MODEL
    texts = texts_for(t, texts)
    is_action = t.loss_mask.copy()
    for start, end, _ in segments.asides_of(t):
        is_action[start:end] = False
    turns = _tokens_by_turn(t)
    starts = np.array([part.start for part in segments.segments_of(t)])
    return {
        **{"env": t.env, "item": t.item_id, "style": style},
        "actions": [
            _action_of(
                texts.text(t.token_ids[_acted(turn[is_action[turn]], starts)].tolist()),
                format=format if is_model else AgentFormat.PLAIN,
                number=t.turn_actions[at] if at < len(t.turn_actions) else None,
            )
            for at, turn in enumerate(turns)
        ],
        "shown": [
            "".join(texts.texts(t.token_ids[turn[~t.loss_mask[turn]]].tolist()))
            for turn in turns
            if is_model  # A scripted policy gets no observations.
        ],
        **{"scores": t.turn_scores.tolist(), "states": t.turn_states.tolist()},
    }


def _action_of(answer: str, *, format: AgentFormat, number: int | None) -> str:
    """Return the action of an answer: the reading with the recorded hash, or the usual one.

    The answer may have thoughts, which the environment did not receive. With tools of the
    environment, the text of an answer without a call was the action.

    Args:
        number: recorded hash of the action; None: not recorded.
    """
    usual = read_any(format, answer)
    for text in (answer, ThoughtForm().text(answer).strip()):
        for action in (read_any(format, text), read_any(format, text, has_own_tools=True), text):
            if action_number(action) == number:
                return action
    return usual


def _tokens_by_turn(t: Trajectory) -> list[np.ndarray]:
    """Return the indices of the tokens of each turn, [turn][num]."""
    order = np.argsort(t.turn_ids, kind="stable")
    cuts = np.searchsorted(t.turn_ids[order], np.arange(t.num_turns + 1))
    return [order[start:end] for start, end in itertools.pairwise(cuts.tolist())]


def _acted(chosen: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the indices of a turn's action tokens [num]: its last run of sampled tokens.

    Earlier samples of the turn are no actions: summaries, and the start or end of a branch.

    Args:
        chosen: indices of the turn's sampled tokens in order, [tokens].
        starts: indices of the first tokens of all segments, [segment].
    """
    is_first = np.diff(chosen, prepend=-2) > 1
    is_first |= starts[np.searchsorted(starts, chosen, side="right") - 1] == chosen
    return chosen[np.flatnonzero(is_first)[-1] :] if chosen.size else chosen


def group_advantages(
    worth: Sequence[float], *, baseline: str, normalize_std: bool
) -> list[float] | None:
    """Return the advantage of each member of a group; None for fewer than two members.

    Args:
        worth: shaped rewards.
        baseline: `algorithm.baseline`: leave_one_out, or the mean of all members.

    The learner computes the same values, before it assigns credit to turns.
    Source: RLOO, arXiv:2402.14740; GRPO, arXiv:2402.03300.
    """
    if len(worth) < 2:
        return None
    values = np.asarray(worth, np.float64)
    centred = values - values.mean()
    if baseline == "leave_one_out":
        centred = centred * len(values) / (len(values) - 1)
    if normalize_std:
        centred = centred / (values.std() + STD_EPSILON)
    return [round(float(value), 6) for value in centred]


def first_difference(one: Trajectory, other: Trajectory, texts: Texts) -> dict[str, Any] | None:
    """Return the first difference between two trajectories; None if they are equal."""
    decoder = texts_for(one, texts)
    texts = texts_for(other, texts)
    num = min(len(one.token_ids), len(other.token_ids))
    differs = np.flatnonzero(one.token_ids[:num] != other.token_ids[:num])
    if not differs.size and len(one.token_ids) == len(other.token_ids):
        return None
    at = int(differs[0]) if differs.size else num
    longer = other if len(other.token_ids) > at else one
    return {
        "token": at,
        "turn": int(longer.turn_ids[at]),
        "first": "".join(decoder.texts(one.token_ids[at : at + NUM_SHOWN].tolist())),
        "this": "".join(texts.texts(other.token_ids[at : at + NUM_SHOWN].tolist())),
    }
