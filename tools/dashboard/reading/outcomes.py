"""Outcomes of episodes, from the learner's step log and the scheduler's outcome log."""

from typing import Any

from common.store.run_dir import RunDir
from tools.dashboard.reading.line_tail import LineTail
from tools.dashboard.reading.rows import EpisodeRows

Settled = tuple[str, str, int]  # (outcome, cause, version of the training step or -1)
MAX_ABSENT = 1000  # Maximum number of listed episodes that never arrived.


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

    def restore(self, kept: list[Any]) -> bool:
        """Continue at the position of an earlier log; return False if the files were replaced."""
        steps, outcomes, waiting = kept
        if not (self._steps.go_to(steps) and self._outcomes.go_to(outcomes)):
            self._steps, self._outcomes = LineTail(self._steps.path), LineTail(self._outcomes.path)
            return False
        self._waiting = {name: (each[0], each[1], each[2]) for name, each in waiting.items()}
        return True

    def problems(self, *, has_steps: bool) -> list[str]:
        """Return the problems of the two files as messages."""
        found = [tail.problem for tail in (self._steps, self._outcomes) if tail.problem]
        if has_steps and not self._has_outcomes():
            found.append(
                f"{self._outcomes.path} is missing, as in runs of older versions. The outcome of"
                " episodes that were not trained on is unknown: filtered or stale."
            )
        return found

    def absent(self, outcome: str) -> list[dict[str, str]]:
        """Return the settled episodes that never arrived, the newest first."""
        found = [
            {"id": episode_id, "outcome": settled[0], "cause": settled[1]}
            for episode_id, settled in list(self._waiting.items())
            if outcome in ("", settled[0])
        ]
        return found[::-1][:MAX_ABSENT]

    def _settle(self, rows: EpisodeRows, episode_id: str, settled: Settled) -> None:
        """Set the outcome of a row, or keep it until the row appears."""
        row = rows.row_of.get(episode_id)
        if row is None:
            self._waiting[episode_id] = settled
            return
        outcome, cause, trained_at = settled
        rows.settle(row, outcome=outcome, cause=cause, trained_at=trained_at)
