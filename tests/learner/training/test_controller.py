"""Laws of the controller: bounded, switchable, remembered."""

import math

import pytest

from common.config.learner import ControllerSection
from learner.training.controller import Controller, Decision


def decide(controller: Controller, ess: float, **options) -> Decision:
    return controller.decide(version=3, ess_frac=ess, masked_frac=0.0, **options)


def test_good_data_changes_nothing() -> None:
    got = decide(Controller(ControllerSection(), max_ahead_steps=2), 0.95)
    assert got == Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=2)


def test_learning_rate_falls_with_ess_to_a_floor() -> None:
    controller = Controller(ControllerSection(skip_step=False), max_ahead_steps=0)
    assert decide(controller, 0.45).lr_scale == pytest.approx(0.5)
    assert decide(controller, 0.01).lr_scale == 0.1


def test_gate_halves_on_bad_steps_and_reopens_by_one() -> None:
    far = Controller(ControllerSection(), max_ahead_steps=16)
    assert [decide(far, 0.6).max_ahead_steps for _ in range(6)] == [8, 4, 2, 1, 0, 0]
    controller = Controller(ControllerSection(recover_steps=2), max_ahead_steps=2)
    assert [decide(controller, 0.6).max_ahead_steps for _ in range(3)] == [1, 0, 0]
    assert [decide(controller, 0.95).max_ahead_steps for _ in range(5)] == [0, 1, 1, 2, 2]


def test_clipped_tokens_close_the_gate_at_full_ess() -> None:
    controller = Controller(ControllerSection(recover_steps=2), max_ahead_steps=8)
    told = [decide(controller, 0.95, clipped_frac=each) for each in (0.1, 0.11, 0.2, 0.0, 0.0)]
    assert [each.max_ahead_steps for each in told] == [8, 4, 2, 2, 3]
    assert {each.lr_scale for each in told} == {1.0}


def test_far_off_policy_batch_is_skipped_and_closes_the_gate() -> None:
    got = decide(Controller(ControllerSection(), max_ahead_steps=3), 0.4)
    assert got == Decision(lr_scale=1.0, is_skipped=True, max_ahead_steps=0)


def test_uniform_policy_shift_is_detected() -> None:
    got = decide(Controller(ControllerSection(), max_ahead_steps=3), 1.0, weight_mean=0.37)
    assert got == Decision(lr_scale=1.0, is_skipped=True, max_ahead_steps=0)
    slower = decide(Controller(ControllerSection(), max_ahead_steps=3), 1.0, weight_mean=0.6)
    assert slower.lr_scale == pytest.approx(0.6 / 0.9)
    grown = decide(Controller(ControllerSection(), max_ahead_steps=3), 1.0, weight_mean=1 / 0.6)
    assert grown == slower


def test_broken_policy_leaves_the_controller_unchanged() -> None:
    controller = Controller(ControllerSection(), max_ahead_steps=3)
    decide(controller, 0.4)
    before = controller.state_dict()
    got = decide(controller, math.nan, weight_mean=math.nan)
    assert got == Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=0)
    assert controller.state_dict() == before
    decide(controller, math.nan, must_train=True)  # The step is repeated.
    assert controller.state_dict() == before


def test_skips_in_a_row_are_bounded() -> None:
    controller = Controller(ControllerSection(max_skips=2), max_ahead_steps=1)
    assert [decide(controller, 0.1).is_skipped for _ in range(4)] == [True, True, False, True]


def test_batch_trained_before_is_not_skipped() -> None:
    controller = Controller(ControllerSection(), max_ahead_steps=1)
    assert not decide(controller, 0.1, must_train=True).is_skipped


def test_every_reaction_can_be_switched_off() -> None:
    off = ControllerSection(scale_lr=False, tighten_gate=False, skip_step=False)
    got = decide(Controller(off, max_ahead_steps=1), 0.01)
    assert got == Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=1)


def test_restored_controller_decides_alike() -> None:
    first = Controller(ControllerSection(), max_ahead_steps=3)
    decide(first, 0.6)
    second = Controller(ControllerSection(), max_ahead_steps=3)
    second.load_state_dict(first.state_dict())
    assert decide(second, 0.6) == decide(first, 0.6)


def test_repeated_decisions_restore_the_controller() -> None:
    cfg = ControllerSection(max_skips=2)
    first, again = (Controller(cfg, max_ahead_steps=3) for _ in range(2))
    for ess_frac in (0.4, 0.95, 0.4, 0.4, 0.4, 0.4):  # the fifth is trained on: enough were skipped
        is_skipped = decide(first, ess_frac).is_skipped
        noisy = 0.6 - ess_frac if is_skipped else ess_frac  # Another machine may round it so.
        decide(again, noisy, must_train=not is_skipped, must_skip=is_skipped)
        assert again.state_dict() == first.state_dict()


def test_reactions_are_logged_with_cause_and_size(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    controller = Controller(ControllerSection(), max_ahead_steps=1)
    decide(controller, 0.6)
    decide(controller, 0.4)
    assert "scaled learning rate version=3 by=0.667 ess=0.600" in caplog.text
    assert "moved gate version=3 ahead_steps=1 to=0 ess=0.600" in caplog.text
    assert "skipped batch version=3 ess=0.400 below=0.50 in_a_row=1" in caplog.text
