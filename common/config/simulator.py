"""Options of the digital twin: the scheduler on virtual time, with sampled episodes and actors."""

from dataclasses import dataclass

from common.errors import ConfigError


def _require(condition: bool, key: str, value: object, law: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value!r}: {law}")


@dataclass(slots=True, kw_only=True)
class TwinSection:
    """What the command `simulate` assumes. Everything else is the run's own configuration."""

    hours: float = 0.0  # of virtual time; 0: until `train.num_steps`
    max_episodes: int = 500_000  # ends a simulation early; rates hold for the time it reached
    mode: str = ""  # async | sync | both, which compares them; "": as `train.mode`
    from_run: str = ""  # a finished run's directory, whose episodes and steps are drawn again
    compare: str = ""  # a finished run's directory to hold the prediction against
    output: str = "runs/twin.json"
    search: bool = True  # recommend a number of actors, a bound on lag and a group size
    search_steps: int = 40  # of each simulation of that search

    # Actors, also with `from_run`.
    num_actors: int = 0  # 0: as `actor.num_actors`
    speed_sigma: float = 0.0  # of the log of an actor's seconds per turn
    join_s: float = 0.0  # actors join evenly over so many seconds
    mtbf_h: float = 0.0  # mean hours between two deaths of an actor; 0: none dies
    restart_s: float = 60.0  # until one that died is back
    failed_frac: float = 0.0  # of episodes, by the environment
    slot_slowdown: float = 0.0  # of an episode, for each other that the actor plays at its start
    delivery_s: float = 0.05  # from an episode's end to the learner's groups

    # Episodes and steps, only without `from_run`.
    turn_s: float = 3.0  # median seconds of a turn
    turn_sigma: float = 0.4  # of its log, from one episode to another
    num_turns: float = 8.0  # median of an episode that no horizon cuts
    num_turns_sigma: float = 0.6  # of its log
    env_s: float = 0.5  # median seconds of the environment in a turn
    tail_frac: float = 0.02  # of episodes whose environment is slow, and with it the episode
    tail_factor: float = 10.0  # by so much
    success: float = 0.5  # mean over items, which differ evenly
    turn_tokens: int = 300  # of prompt and answer, for the learner
    step_s: float = 5.0  # of a step, publishing included, beside
    learner_tokens_per_s: float = 8000.0

    def __post_init__(self) -> None:
        modes = ("", "async", "sync", "both")
        _require(self.mode in modes, "twin.mode", self.mode, f"one of {modes}")
        law = "must be >= 0"
        for name in ("hours", "num_actors", "speed_sigma", "join_s", "mtbf_h", "restart_s"):
            _require(getattr(self, name) >= 0, f"twin.{name}", getattr(self, name), law)
        for name in ("slot_slowdown", "delivery_s", "turn_sigma", "num_turns_sigma", "env_s"):
            _require(getattr(self, name) >= 0, f"twin.{name}", getattr(self, name), law)
        _require(self.step_s >= 0, "twin.step_s", self.step_s, law)
        law = "must be > 0"
        for name in ("max_episodes", "search_steps", "turn_s", "turn_tokens"):
            _require(getattr(self, name) > 0, f"twin.{name}", getattr(self, name), law)
        rate = self.learner_tokens_per_s
        _require(rate > 0, "twin.learner_tokens_per_s", rate, law)
        _require(self.num_turns >= 1, "twin.num_turns", self.num_turns, "must be >= 1")
        _require(self.tail_factor >= 1, "twin.tail_factor", self.tail_factor, "must be >= 1")
        for name in ("failed_frac", "tail_frac"):
            value: float = getattr(self, name)
            _require(0 <= value < 1, f"twin.{name}", value, "must be in [0, 1)")
        _require(0 < self.success < 1, "twin.success", self.success, "must be in (0, 1)")
