"""Charts and evaluations of a run for wandb, as the dashboard shows them."""

from collections.abc import Mapping, Set
from typing import Any

from common.config.run_config import RunConfig
from common.errors import WireError
from common.store.run_dir import RunDir
from learner.wandb_sink import COLUMNS, WandbSink
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.web.views import charts, evaluations, samples
from tools.dashboard.words import plain

MAX_ROWS = 30
MAX_CHARS = 8000  # Maximum length of an episode's text in a table.


def make_sink(cfg: RunConfig, run_dir: RunDir) -> WandbSink:
    """Return the wandb sink of a training run, with its charts and evaluations."""
    return WandbSink(run_dir, cfg, views=DashboardViews(run_dir))


class DashboardViews:
    """The `RunViews` of a run, read from its journal."""

    def __init__(self, run_dir: RunDir) -> None:
        self._source = RunSource(run_dir.root.resolve(), name=run_dir.root.name)

    def charted(self, names: Set[str]) -> Set[str]:
        """Return the metrics that the dashboard draws."""
        shown = charts(dict.fromkeys(names))
        return {name for chart in shown for name in chart["series"]}

    def refresh(self, budget_s: float) -> bool:
        """Read the journal for at most `budget_s` seconds; return whether more is left."""
        return self._source.refresh(budget_s=budget_s)

    def evaluations(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the scores of each evaluation in the journal, by its name."""
        return evaluations(self._source.rows)

    def sampled_episodes(self, evaluation: str) -> list[list[Any]]:
        """Return at most MAX_ROWS episodes of an evaluation, each a row of COLUMNS."""
        rows = samples(self._source.rows, group=f"eval-{evaluation}")[:MAX_ROWS]
        return [self._cells(row) for row in rows]

    def _cells(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the row of an episode; the text of a damaged episode is its error."""
        try:
            segments = self._source.episode(str(row["id"]))["segments"]
            parts = [f"[{each['kind']}] {''.join(each['texts'])}" for each in segments]
            text = plain("\n".join(parts))
        except WireError as error:
            text = f"The record is damaged: {error}"
        return [*(row[name] for name in COLUMNS[:-1]), text[:MAX_CHARS]]
