"""Laws of the charts of a run."""

import torch

from common.config.algorithm import AlgorithmSection
from learner.objective.loss import metric_names
from learner.objective.measures import lag_statistics, ratio_statistics
from learner.views import charts


def _series_by_title(names: list[str]) -> dict[str, list[str]]:
    return {chart["title"]: chart["series"] for chart in charts(dict.fromkeys(names))}


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
