"""Laws of the charts of a run."""

from dataclasses import replace

import numpy as np
import torch

from common.config.algorithm import AlgorithmSection
from learner.journal.index import EpisodeRows, values_of
from learner.objective.loss import metric_names
from learner.objective.measures import lag_statistics, ratio_statistics
from learner.views import charts, rows_by_subset
from tests.learner.builders import make_trajectory


def _series_by_title(names: list[str]) -> dict[str, list[str]]:
    return {chart["title"]: chart["series"] for chart in charts(dict.fromkeys(names))}


def test_equal_subsets_of_two_environments_have_rows_of_their_own() -> None:
    rows = EpisodeRows()
    items = [("maze", "all"), ("wordle", "all"), ("maze", "far"), ("maze", "all")]
    for number, (env, subset) in enumerate(items):
        item_id = f"{subset}-test-{number}"
        name = f"e/{number}"
        trajectory = replace(make_trajectory([1], [1]), episode_id=name, env=env, item_id=item_id)
        rows.add(name, {"segment": 0, "offset": 0, **values_of(trajectory)})
    found = rows_by_subset(rows, np.array([0, 1, 2, 3]))
    assert {name: part.tolist() for name, part in found} == {
        "maze/all": [0, 3],
        "wordle/all": [1],
        "far": [2],
    }
    (only,) = rows_by_subset(rows, np.array([1]))  # One name for all tables of a run.
    assert only[0] == "wordle/all"
    assert rows_by_subset(EpisodeRows(), np.zeros(0, np.int64)) == []


def test_noise_and_effect_of_lag_share_a_chart() -> None:
    new = torch.tensor([0.0, -1.0])
    metrics = lag_statistics(new, new + 0.1, torch.tensor([0, 1]))
    shown = _series_by_title([*metrics])
    names = ["offpolicy/lag_abs_logprob", "offpolicy/noise_abs_logprob"]
    assert shown == {"Log importance ratio: lag and noise": names}


def test_kl_to_sampler_and_to_reference_have_charts_of_their_own() -> None:
    logprobs = torch.tensor([0.0, -1.0])
    names = [*ratio_statistics(logprobs, logprobs), *metric_names(AlgorithmSection(kl_coef=0.1))]
    shown = _series_by_title(names)
    assert shown["KL to the sampling policy"] == ["policy/kl_sampler"]
    assert shown["KL to the reference policy"] == ["policy/kl_reference"]
