"""A small run for the simulator."""

from dataclasses import fields
from typing import Any

from common.wire.messages import EndReason
from tests.scheduler.builders import make_config
from tools.simulator.config import SimulatorConfig, SimulatorSection
from tools.simulator.workload import SimulatedEpisode


def make_simulated(
    *, num_steps: int = 20, max_ahead_steps: int = 1, **simulator: Any
) -> SimulatorConfig:
    """Two groups of four a step; horizons 5, 10, 20, two steps each."""
    section = SimulatorSection(**{"num_actors": 2, "search_steps": 5, **simulator})
    cfg = make_config(num_steps=num_steps, max_ahead_steps=max_ahead_steps)
    settings = {field.name: getattr(cfg, field.name) for field in fields(cfg)}
    return SimulatorConfig(simulator=section, **settings)


def make_play(*, wall_s: float = 1.0, worth: float = 1.0, num_turns: int = 4) -> SimulatedEpisode:
    return SimulatedEpisode(
        num_turns=num_turns,
        wall_s=wall_s,
        num_tokens=10 * num_turns,
        num_sampled_tokens=5 * num_turns,
        worth=worth,
        is_success=worth > 0.5,
        end_reason=EndReason.DONE,
    )
