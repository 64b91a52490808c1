"""Laws of the user's own functions as parts of the objective."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.config.algorithm import Advantage, AlgorithmSection, Correction, PolicyLoss
from common.config.learner import LearnerSection
from common.errors import ConfigError
from common.user_code import changed_functions
from learner.algorithms import table
from learner.algorithms.interface import MAX_LOG_RATIO, LossInputs, Surrogate, Weight
from learner.algorithms.user_functions import read_keys, small_batch
from learner.objective.advantages import group_has_signal, samples_of
from learner.objective.description import dead_knobs, objective_text, summary_lines
from learner.objective.loss import Denominator, importance_weights, policy_loss
from tests.learner.objective.ragged import groups

CPU = torch.device("cpu")
OWN = """
import torch

def ppo(inputs, cfg):
    '''The clipped loss of PPO, from its formula.'''
    r = torch.exp(inputs.new_logprobs - inputs.anchor_logprobs)
    a = inputs.advantages
    loss = torch.max(-a * r, -a * torch.clamp(r, 1 - cfg.clip_low, 1 + cfg.clip_high))
    if cfg.dual_clip:
        loss = torch.where(a < 0, torch.min(loss, -a * cfg.dual_clip), loss)
    return loss

def grpo(rewards, members, cfg):
    n = len(rewards)
    return [r - (sum(rewards) - r) / (n - 1) if n > 1 else 0.0 for r in rewards]

def token_tis(log_rho, sequence_ids, num_sequences, cfg):
    return torch.exp(log_rho).clamp(max=cfg.tis_cap)

def near(log_rho, sequence_ids, num_sequences, cfg):
    return log_rho.abs() < 0.5

def by_turn(rewards, members, cfg):
    return [member.turn_scores - rewards.mean().item() for member in members]

def mean_of_batch(inputs, cfg):
    return -inputs.log_ratios.exp() * (inputs.advantages - inputs.advantages.mean())

def likelihood(inputs, cfg):
    return -inputs.new_logprobs

def far_penalty(inputs, cfg):
    return ppo(inputs, cfg) + torch.relu(inputs.log_ratios.abs() - 0.2)

def scalar(inputs, cfg): return ppo(inputs, cfg).mean()
def detached(inputs, cfg): return ppo(inputs, cfg).detach()
def infinite(inputs, cfg): return inputs.new_logprobs / 0
def wrong_name(inputs, cfg): return inputs.logprobs
def text(inputs, cfg): return "loss"
def one_argument(inputs): return 0
def deviation(rewards, members, cfg): return (rewards - rewards.mean()) / rewards.std()
def nothing(rewards, members, cfg): return rewards * 0
def alone(rewards, members, cfg): return rewards / (rewards * 0 + len(rewards) - 2)
def too_few(rewards, members, cfg): return rewards[1:]
def of_none(rewards, members, cfg): return [None] * len(members)
def of_texts(rewards, members, cfg): return ["0.5"] * len(members)
def far_log(inputs, cfg): return ppo(inputs, cfg) / (inputs.advantages < 5)
def far_weight(log_rho, sequence_ids, num_sequences, cfg): return 2 - log_rho
async def waits(rewards, members, cfg): return rewards - rewards.mean()
def yields(rewards, members, cfg): yield from rewards - rewards.mean()
def negative(log_rho, sequence_ids, num_sequences, cfg): return log_rho
def removes_all(log_rho, sequence_ids, num_sequences, cfg): return log_rho != 0
calls = []
def growing(rewards, members, cfg):
    calls.append(1)
    return rewards - rewards.mean() + len(calls)
def drawn_turns(rewards, members, cfg): return [torch.rand(member.num_turns) for member in members]
def drawn_loss(inputs, cfg): return ppo(inputs, cfg) * (1 + torch.rand(1))
def changed_loss(inputs, cfg):
    inputs.advantages.mul_(0.5)
    return ppo(inputs, cfg)
def drawn_weight(log_rho, sequence_ids, num_sequences, cfg): return torch.rand(len(log_rho))
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Return the reference of a function in a file of the user."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def loss_and_gradient(cfg: AlgorithmSection) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = small_batch(cfg, CPU)
    wide = replace(inputs, anchor_logprobs=inputs.sampler_logprobs - torch.linspace(-1.5, 1.5, 7))
    loss, _ = policy_loss(wide, Denominator(num_tokens=7, num_sequences=2), cfg)
    loss.backward()
    assert inputs.new_logprobs.grad is not None
    return loss.detach(), inputs.new_logprobs.grad


def test_own_loss_has_the_gradient_of_the_same_formula_of_the_project(
    own: Callable[[str], str],
) -> None:
    mine = loss_and_gradient(AlgorithmSection(policy_loss=own("ppo")))
    theirs = loss_and_gradient(AlgorithmSection(policy_loss=PolicyLoss.PPO))
    torch.testing.assert_close(mine, theirs)


def test_own_advantage_equals_the_same_formula_of_the_project(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(advantage=own("grpo"))
    mine = [sample.advantage for sample in samples_of([*groups()], cfg)]
    theirs = [sample.advantage for sample in samples_of([*groups()], AlgorithmSection())]
    assert mine == pytest.approx(theirs)


def test_own_advantage_of_turns_adds_to_their_tokens(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(advantage=own("by_turn"))
    for sample in samples_of([*groups()], cfg):
        turns = sample.trajectory.turn_ids[sample.trajectory.loss_mask]
        assert sample.turn_advantages is not None
        assert sample.token_advantages() == pytest.approx(sample.turn_advantages[turns])


def test_group_has_no_signal_if_all_its_own_advantages_are_zero(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(advantage=own("grpo"))
    members = groups()[0].members
    equal = [replace(member, reward=1.0, start_score=0.0) for member in members]
    unequal = [replace(member, reward=n / 10) for n, member in enumerate(equal)]
    assert group_has_signal(unequal, cfg)
    assert not group_has_signal(equal, cfg)


def test_own_weight_replaces_rho_and_own_mask_keeps_it(own: Callable[[str], str]) -> None:
    log_rho = torch.tensor([0.0, 0.4, -0.4, 3.0])
    ids = torch.zeros(4, dtype=torch.int64)

    def weights(name: str) -> list[float]:
        cfg = AlgorithmSection(correction=name)
        return importance_weights(log_rho, ids, 1, cfg, is_ratio_included=True).tolist()

    assert weights(own("token_tis")) == pytest.approx(weights(Correction.TOKEN_TIS))
    assert weights(own("near")) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("key", "name", "part"),
    [
        ("policy_loss", "scalar", r"a tensor \[\]; expected one loss for each token, \[7\]"),
        ("policy_loss", "detached", "the loss has no gradient"),
        ("policy_loss", "infinite", "not finite"),
        ("policy_loss", "wrong_name", r"no attribute 'logprobs' \(own.py, line"),
        ("policy_loss", "text", "returned str"),
        ("policy_loss", "one_argument", "takes 1 positional argument but 2 were given"),
        ("policy_loss", "absent", "has no function 'absent'; it has ppo, grpo"),
        ("advantage", "deviation", r"nan.* for the rewards \[1.0, 1.0, 1.0, 1.0\], not finite"),
        ("advantage", "nothing", "every advantage is 0"),
        ("advantage", "too_few", "returned 3 values; expected a number for each of the 4 members"),
        (
            "advantage",
            "of_none",
            r"returned \[None, None, None, None\]; expected a number for each",
        ),
        ("advantage", "of_texts", "returned .'0.5', .*; expected a number for each"),
        ("advantage", "waits", "is asynchronous; write `def`"),
        ("advantage", "yields", "is a generator; write `return`"),
        ("advantage", "alone", r"returned \[nan, inf\] for the rewards \[0.0, 1.0\], not finite"),
        ("correction", "negative", "a weight is finite and >= 0"),
        ("correction", "removes_all", "its weight is 0 where rho is 1"),
    ],
)
def test_wrong_function_is_refused_with_its_key(
    own: Callable[[str], str], key: str, name: str, part: str
) -> None:
    named: dict[str, Any] = {key: own(name)}
    cfg = AlgorithmSection(**named)
    with pytest.raises(ConfigError, match=part) as refused:
        table.check(cfg, min_size=2)
    assert str(refused.value).startswith(f"algorithm.{key}={own(name)}: ")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("advantage", "growing"),
        ("advantage", "drawn_turns"),
        ("policy_loss", "drawn_loss"),
        ("policy_loss", "changed_loss"),
        ("correction", "drawn_weight"),
    ],
)
def test_function_that_depends_on_more_than_its_arguments_is_refused(
    own: Callable[[str], str], key: str, name: str
) -> None:
    named: dict[str, Any] = {key: own(name)}
    with pytest.raises(ConfigError, match="two calls with equal arguments returned ") as refused:
        table.check(AlgorithmSection(**named), min_size=2)
    assert str(refused.value).startswith(f"algorithm.{key}={own(name)}: ")


def test_value_that_becomes_wrong_during_training_is_named(own: Callable[[str], str]) -> None:
    named: dict[str, Any] = {"policy_loss": own("far_log"), "correction": own("far_weight")}
    cfg = AlgorithmSection(**named)
    inputs = small_batch(cfg, CPU)
    scope = Denominator(num_tokens=7, num_sequences=2)
    assert policy_loss(inputs, scope, cfg)[0].isfinite()
    with pytest.raises(ConfigError, match=r"far_log: returned .*inf.* for finite log-prob"):
        policy_loss(replace(inputs, advantages=inputs.advantages * 9), scope, cfg)
    weight = table.weight_of(cfg).weight
    with pytest.raises(ConfigError, match=r"far_weight: returned \[-1.0\] for log rho \[3.0\]"):
        weight(torch.tensor([3.0]), torch.zeros(1, dtype=torch.long), 1, cfg)


def test_missing_module_is_named() -> None:
    for reference, part in (("no/such.py:f", "no such file"), ("no.such:f", "No module named")):
        with pytest.raises(ConfigError, match=f"policy_loss={reference.split(':')[0]}.*{part}"):
            table.check(AlgorithmSection(policy_loss=reference), min_size=2)


def test_printed_objective_names_the_functions(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(
        policy_loss=own("ppo"), advantage=own("grpo"), correction=own("token_tis")
    )
    text = objective_text(cfg, LearnerSection())
    for part in ("w*(-own.py:ppo)", "w=own.py:token_tis(r)/r", "A=own.py:grpo(R)"):
        assert part in text
    lines = summary_lines(cfg, LearnerSection())
    assert any("ppo: The clipped loss of PPO, from its formula. (sha256" in line for line in lines)


def test_keys_that_an_own_function_reads_count_as_used(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(
        policy_loss=own("ppo"), correction=own("near"), clip_low=0.1, dppo_delta=0.1, tis_cap=3.0
    )
    dead = [line.partition("=")[0] for line in dead_knobs(cfg, LearnerSection())]
    assert dead == ["algorithm.dppo_delta", "algorithm.tis_cap"]


def test_loss_that_reads_other_sequences_is_noted(own: Callable[[str], str]) -> None:
    def noted(name: str) -> bool:
        lines = summary_lines(AlgorithmSection(policy_loss=own(name)), LearnerSection())
        return any("reads other sequences" in line for line in lines)

    assert noted("mean_of_batch")
    assert not noted("ppo")


def test_samples_without_advantage_train_with_a_loss_of_the_user(own: Callable[[str], str]) -> None:
    for name in ("ppo", "likelihood", "far_penalty"):
        cfg = AlgorithmSection(policy_loss=own(name))
        assert not table.surrogate_of(cfg).is_zero_without_advantage


def test_penalty_of_far_ratios_has_a_gradient_without_advantage(own: Callable[[str], str]) -> None:
    cfg = AlgorithmSection(policy_loss=own("far_penalty"))
    inputs = small_batch(cfg, CPU)
    anchor = inputs.anchor_logprobs - 0.5
    unpaid = replace(inputs, advantages=torch.zeros(7), anchor_logprobs=anchor)
    (losses, _) = table.surrogate_of(cfg).loss(unpaid, cfg)
    losses.sum().backward()
    assert unpaid.new_logprobs.grad is not None
    assert (unpaid.new_logprobs.grad == 1).all()


def test_changed_file_of_a_function_is_named() -> None:
    was = {"algorithm.policy_loss=own.py:ppo": "aa" * 32}
    [line] = changed_functions(was, {"algorithm.policy_loss=own.py:ppo": "bb" * 32})
    assert line.startswith("algorithm.policy_loss=own.py:ppo: its file has changed")
    assert changed_functions(was, was) == []
    assert changed_functions({}, was) == []  # The run had another function, or none.


@pytest.mark.parametrize("kind", PolicyLoss)
def test_surrogate_declares_the_keys_that_it_reads(kind: PolicyLoss) -> None:
    part: Surrogate = table.SURROGATES[kind]
    inputs: LossInputs = small_batch(AlgorithmSection(), CPU)
    assert {*part.keys} == {*read_keys(AlgorithmSection(), lambda cfg: part.loss(inputs, cfg))}


@pytest.mark.parametrize("kind", Correction)
def test_weight_declares_the_keys_that_it_reads(kind: Correction) -> None:
    part: Weight = table.WEIGHTS[kind]
    log_rho = torch.linspace(-1, 1, 7).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ids = torch.tensor([0, 0, 0, 0, 1, 1, 1])

    def call(cfg: AlgorithmSection) -> None:
        part.weight(log_rho, ids, 2, cfg)
        if part.batch_mask is not None:
            part.batch_mask(log_rho, cfg)

    assert {*part.keys} == {*read_keys(AlgorithmSection(), call)}


def test_table_has_every_name() -> None:
    assert {*table.SURROGATES} == {*PolicyLoss}
    assert {*table.WEIGHTS} == {*Correction}
    assert {*table.ESTIMATORS} == {*Advantage}
