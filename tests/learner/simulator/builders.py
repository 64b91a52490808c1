"""A small run for the twin."""

from dataclasses import replace
from typing import Any

from common.config.run_config import RunConfig
from common.config.simulator import TwinSection
from common.wire.messages import EndReason
from learner.simulator.workload import Play
from tests.learner.scheduler.builders import make_config


def make_twin(*, num_steps: int = 20, max_ahead_steps: int = 1, **twin: Any) -> RunConfig:
    """Two groups of four a step; horizons 5, 10, 20, two steps each."""
    section = TwinSection(**{"num_actors": 2, "search_steps": 5, **twin})
    cfg = make_config(num_steps=num_steps, max_ahead_steps=max_ahead_steps)
    return replace(cfg, twin=section)


def make_play(*, wall_s: float = 1.0, worth: float = 1.0, num_turns: int = 4) -> Play:
    return Play(
        num_turns=num_turns,
        wall_s=wall_s,
        num_tokens=10 * num_turns,
        worth=worth,
        is_success=worth > 0.5,
        end_reason=EndReason.DONE,
    )
