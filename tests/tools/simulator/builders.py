"""A small run for the simulator."""

from dataclasses import replace
from typing import Any

from common.config.offline import SimulatorSection
from common.config.run_config import RunConfig
from common.wire.messages import EndReason
from tests.scheduler.builders import make_config
from tools.simulator.workload import SimulatedEpisode


def make_simulated(*, num_steps: int = 20, max_ahead_steps: int = 1, **simulator: Any) -> RunConfig:
    """Two groups of four a step; horizons 5, 10, 20, two steps each."""
    section = SimulatorSection(**{"num_actors": 2, "search_steps": 5, **simulator})
    cfg = make_config(num_steps=num_steps, max_ahead_steps=max_ahead_steps)
    return replace(cfg, simulator=section)


def make_play(*, wall_s: float = 1.0, worth: float = 1.0, num_turns: int = 4) -> SimulatedEpisode:
    return SimulatedEpisode(
        num_turns=num_turns,
        wall_s=wall_s,
        num_tokens=10 * num_turns,
        worth=worth,
        is_success=worth > 0.5,
        end_reason=EndReason.DONE,
    )
