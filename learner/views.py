"""Charts of a run's metrics, and scores and notable episodes from its journal.

The dashboard, the report and wandb show the same ones.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from common.wire.messages import EndReason
from learner.intervals import wilson_interval
from learner.journal.index import EpisodeRows

INFRASTRUCTURE = [each.value for each in EndReason if each.is_infrastructure_failure]
NOTABLE = (("best", "reward", -1), ("worst", "reward", 1), ("most surprising", "logprob", 1))
MIN_SAMPLES = 10
MAX_SAMPLES = 45
# Title, unit and metrics of each chart. A name that ends in "*" is a prefix.
CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Success", "share", ("reward/success", "tasks/success/*")),
    ("Truncation", "share", ("episodes/truncated_frac", "episodes/context_full_frac")),
    ("Reward", "", ("reward/mean",)),
    ("Turns and invalid actions", "", ("episodes/turns_mean", "episodes/invalid_frac")),
    ("Cut observations of an episode", "", ("episodes/cut_observations_mean",)),
    ("Distance of the items", "turns of the expert", ("distance/value", "distance/mean")),
    ("Entropy", "nats", ("policy/entropy",)),
    ("Mutual information of prompt and answer", "nats", ("policy/mutual_information",)),
    ("Effective sample size", "share", ("offpolicy/ess_frac",)),
    ("Lag", "versions", ("offpolicy/lag_mean", "offpolicy/lag_max")),
    (
        "Importance ratio: quantiles",
        "",
        ("offpolicy/ratio_p01", "offpolicy/ratio_p50", "offpolicy/ratio_p99"),
    ),
    (
        "Log importance ratio: lag and noise",
        "nats",
        ("offpolicy/lag_abs_logprob", "offpolicy/noise_*"),
    ),
    ("KL to the sampling policy", "nats", ("policy/kl_sampler",)),
    ("KL to the reference policy", "nats", ("policy/kl_reference",)),
    ("Loss", "", ("loss/*",)),
    ("Loss of training on examples", "nats", ("sft/loss", "dpo/loss", "evolve/loss")),
    ("Pairs with the chosen episode first", "share", ("dpo/accuracy",)),
    ("Clipped and masked tokens", "share", ("policy/clipped_frac", "policy/masked_frac")),
    ("Gradient norm", "", ("train/grad_norm",)),
    ("Updates hidden by rounding to 16 bits", "share", ("train/vanished_update_frac",)),
    ("Scale of the loss in fp16", "", ("train/loss_scale",)),
    ("Tokens per second", "tokens/s", ("actor/tokens_per_s", "train/tokens_per_s")),
    ("Seconds of a step", "s", ("wait/batch_s", "train/step_s", "publish/total_s")),
    (
        "Seconds of an episode",
        "s",
        ("episodes/generate_s_mean", "episodes/env_s_mean", "episodes/wall_s_mean"),
    ),
)


def charts(names: Mapping[str, object]) -> list[dict[str, Any]]:
    """Return the charts with at least one metric, each with the names of its series."""
    shown: list[dict[str, Any]] = []
    for title, unit, wanted in CHARTS:
        series: list[str] = []
        for pattern in wanted:
            matching = [pattern] if pattern in names else []
            if pattern.endswith("*"):
                matching = sorted(
                    n for n in names if n.startswith(pattern[:-1]) and n.count("/") < 4
                )
            series += [name for name in matching if name not in series]
        if series:
            shown.append({"title": title, "unit": unit, "series": series[:12]})
    return shown


def played(rows: EpisodeRows, kind: str) -> np.ndarray:
    """Return the newest row of each episode of one kind."""
    newest = np.array(list(rows.row_of.values()), np.int64)
    return newest[rows.column("kind")[newest] == rows.names["kind"].codes.get(kind, -1)]


def evaluations(rows: EpisodeRows) -> dict[str, dict[str, Any]]:
    """Return the scores by evaluation, in the order of their start, each also by subset.

    `version` is the learner's version at the start of the evaluation.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for name, selected in rows_by_name(rows, "group", played(rows, "eval")):
        whole = score(rows, selected)
        whole["version"] = int(rows.column("version")[selected].max())
        whole["by_subset"] = {
            subset: score(rows, part) for subset, part in rows_by_subset(rows, selected)
        }
        by_name[name.removeprefix("eval-")] = whole
    return by_name


def score(rows: EpisodeRows, selected: np.ndarray) -> dict[str, Any]:
    """Return success with its 95 % interval (Wilson), without infrastructure failures."""
    good = selected[~_has_failed(rows, selected)]
    num = len(good)
    num_solved = int(rows.column("success")[good].sum())
    return {
        "num": num,
        "failed": len(selected) - num,
        "success": num_solved / num if num else None,
        "ci95": wilson_interval(num_solved, num) if num else None,
    }


def samples(rows: EpisodeRows, *, group: str = "") -> list[dict[str, Any]]:
    """Return the notable episodes, with `why`: best, worst, most surprising by subset.

    They come from all episodes, or from one group, such as an evaluation. The subset with the
    lowest success comes first. There are at least `MIN_SAMPLES` rows if enough episodes exist: with
    few subsets, each subset has several.
    """
    selected = np.concatenate([played(rows, "train"), played(rows, "eval")])
    if group:
        selected = selected[
            rows.column("group")[selected] == rows.names["group"].codes.get(group, -1)
        ]
    selected = selected[~_has_failed(rows, selected) & (rows.column("sampled")[selected] > 0)]
    parts = sorted(
        rows_by_subset(rows, selected), key=lambda p: float(rows.column("success")[p[1]].mean())
    )
    picked: dict[int, str] = {}
    place_of: dict[int, int] = {}  # Row -> place of its subset, the hardest first.
    for rank in range(MIN_SAMPLES):
        for place, (_, part) in enumerate(parts):
            for why, column, sign in NOTABLE:
                order = part[np.argsort(sign * rows.column(column)[part], kind="stable")]
                fresh = next((int(row) for row in order if int(row) not in picked), None)
                if fresh is not None and len(picked) < MAX_SAMPLES:
                    picked[fresh] = why if rank == 0 else f"{why} #{rank + 1}"
                    place_of[fresh] = place
        if len(picked) >= MIN_SAMPLES:
            break
    ordered = sorted(picked, key=lambda row: (place_of[row], picked[row]))
    return [{**rows.get(row), "why": picked[row]} for row in ordered]


def _has_failed(rows: EpisodeRows, selected: np.ndarray) -> np.ndarray:
    """Return which rows ended with an infrastructure failure, bool."""
    codes = [rows.names["end"].codes.get(name, -1) for name in INFRASTRUCTURE]
    return np.isin(rows.column("end")[selected], codes)


def rows_by_subset(rows: EpisodeRows, selected: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the rows of each subset of each environment, by its name as in `subset_names`."""
    num = rows.num
    subset_codes = rows.column("subset")[:num].astype(np.int64)
    env_codes = rows.column("env")[:num]
    envs = rows.names["env"].texts  # Read after the codes, which another thread appends.
    subsets = rows.names["subset"].texts
    num_envs = len(envs)
    pairs = subset_codes * num_envs + env_codes
    present = np.flatnonzero(np.bincount(pairs))
    pair_of = {int(code): (envs[code % num_envs], subsets[code // num_envs]) for code in present}
    names = subset_names(pair_of.values())
    chosen = pairs[selected]
    return [(names[pair_of[int(code)]], selected[chosen == code]) for code in np.unique(chosen)]


def subset_names(pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Return a name for each (environment, subset): "environment/subset" if the subset is not one.

    Example: {("maze", "all"), ("wordle", "all"), ("maze", "far")} -> "maze/all", "wordle/all" and
    "far".
    """
    distinct = dict.fromkeys(pairs)
    counts = Counter(subset for _, subset in distinct)
    return {
        (env, subset): f"{env}/{subset}" if counts[subset] > 1 else subset
        for env, subset in distinct
    }


def rows_by_name(
    rows: EpisodeRows, column: str, selected: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """Return (name, rows) for each value of a name column, in order of first occurrence."""
    codes = rows.column(column)[selected]
    texts = rows.names[column].texts
    return [(texts[code], selected[codes == code]) for code in np.unique(codes)]
