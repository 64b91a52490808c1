"""A run's directory as a source of displays: its episodes, metrics, state and problems."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from common.config.actor import AgentFormat
from common.errors import ConfigError, WireError
from common.host.lock import is_held
from common.store.run_dir import RunDir, as_map, json_object
from learner.journal.index import IN_FLIGHT, EpisodeIndex, EpisodeRows
from learner.journal.texts import Texts, TokenIdDecoder, segments_of, texts_of_run
from tools.dashboard.reading.episode import first_difference, group_advantages, recorded_of
from tools.dashboard.reading.index_cache import IndexCache
from tools.dashboard.reading.line_logs import MetricColumns, OutcomeLog
from tools.dashboard.reading.rows import page
from tools.dashboard.run_state import is_part
from tools.dashboard.verdict import ThroughputVerdict, judge

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
        texts += [text for text in (self.metrics.problem, self._text_problem) if text]
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
        texts = self.texts()
        shown: list[dict[str, Any]] = []
        first = None
        for row in members[:MAX_MEMBERS]:
            values = self.index.rows.get(row)
            entry = {**values, "advantage": advantages.get(values["id"])}
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

    def _advantages(self, members: list[int]) -> dict[str, float]:
        """Return each member's advantage as the learner's group baseline gives it."""
        rows = self.index.rows
        algorithm = _section(self.config(), "algorithm")
        penalty = float(algorithm.get("invalid_action_penalty") or 0.0)
        worth: dict[str, float] = {}
        for row in members:
            episode = rows.get(row)
            if episode["outcome"] == "failed" or episode["end"] in ("env_error", "env_timeout"):
                continue
            cost = penalty * episode["invalid"] / max(1, episode["turns"])
            worth[episode["id"]] = episode["reward"] - cost
        values = group_advantages(
            [*worth.values()],
            baseline=str(algorithm.get("baseline") or "leave_one_out"),
            normalize_std=bool(algorithm.get("normalize_std")),
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


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a stored configuration; {} without it."""
    return as_map(config.get(name))
