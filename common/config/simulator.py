"""Options of the simulator: the scheduler on virtual time, with sampled episodes and actors."""

from dataclasses import dataclass

from common.config.knobs import PATH, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSection:
    """What the command `simulate` assumes. Everything else is the run's own configuration.

    Actors are as described here also with `from_run`; episodes and steps only without.
    """

    hours: float = knob(0.0, "of virtual time; 0: until train.num_steps", ge=0, le=10**6)
    max_episodes: int = knob(
        500_000, "ends early; rates hold for the time it reached", ge=1, le=10**8
    )
    mode: str = knob("", 'both: compare; "": train.mode', one_of=("async", "sync", "both"), also="")
    from_run: str = knob("", "a finished run's directory, whose episodes and steps are drawn again")
    compare: str = knob("", "a finished run's directory to hold the prediction against")
    output: str = knob("runs/simulation.json", "file of the result", form=PATH)
    search: bool = knob(True, "recommend a number of actors, a bound on lag and a group size")
    search_steps: int = knob(40, "steps of each simulation of that search", ge=1, le=10**6)

    num_actors: int = knob(0, "0: as actor.num_actors", ge=0, le=10**4)
    speed_sigma: float = knob(0.0, "of the log of an actor's seconds per turn", ge=0, le=10)
    join_s: float = knob(0.0, "seconds over which actors join evenly", ge=0)
    mtbf_h: float = knob(
        0.0, "mean hours between two deaths of an actor; 0: none dies", also=0, ge=0.01
    )
    restart_s: float = knob(60.0, "seconds until one that died is back", ge=0)
    failed_frac: float = knob(0.0, "of episodes, by the environment", ge=0, lt=1)
    slot_slowdown: float = knob(0.0, "of an episode, per other at its start", ge=0, le=1000)
    delivery_s: float = knob(0.05, "seconds from an episode's end to the learner's groups", ge=0)

    turn_s: float = knob(3.0, "median seconds of a turn", gt=0)
    turn_sigma: float = knob(0.4, "of its log, from one episode to another", ge=0, le=10)
    num_turns: float = knob(8.0, "median of an episode that no horizon cuts", ge=1)
    num_turns_sigma: float = knob(0.6, "of its log", ge=0, le=10)
    env_s: float = knob(0.5, "median seconds of the environment in a turn", ge=0)
    tail_frac: float = knob(0.02, "of episodes whose environment is slow", ge=0, lt=1)
    tail_factor: float = knob(10.0, "x as slow are those", ge=1)
    success: float = knob(0.5, "mean over items, which differ evenly", gt=0, lt=1)
    turn_tokens: int = knob(300, "of prompt and answer, for the learner", ge=1)
    step_s: float = knob(5.0, "seconds of a step, publishing included, beside its tokens", ge=0)
    learner_tokens_per_s: float = knob(8000.0, "tokens the learner trains on", gt=0)
