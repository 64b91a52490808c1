"""The section `simulator`, and the configuration of the command `simulate`."""

from dataclasses import dataclass, field

from common.config.knobs import PATH, knob
from common.config.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorSection:
    """Assumptions of the command `simulate`. All other values come from the run's configuration.

    The actors are modelled from these keys, also with `from_run`. The keys of episodes and steps
    are used only without `from_run`.
    """

    hours: float = knob(
        0.0, "Simulates this many virtual hours. 0 simulates train.num_steps.", ge=0, le=10**6
    )
    max_episodes: int = knob(
        500_000,
        "Ends the simulation early after this many episodes. Rates hold for the simulated time.",
        ge=1,
        le=10**8,
    )
    mode: str = knob(
        "",
        "Selects the mode to simulate; `both` compares them. Empty means train.mode.",
        one_of=("async", "sync", "both"),
        also="",
    )
    from_run: str = knob(
        "", "Names the directory of a finished run whose episodes and steps are drawn again."
    )
    compare: str = knob(
        "", "Names the directory of a finished run that the prediction is compared with."
    )
    output: str = knob("runs/simulation.json", "Names the file of the result.", form=PATH)
    search: bool = knob(True, "Recommends a number of actors, a bound on lag and a group size.")
    search_steps: int = knob(
        40, "Makes this many steps in each simulation of the search.", ge=1, le=10**6
    )

    num_actors: int = knob(
        0, "Sets the number of engines. 0 means those of actor.num_actors.", ge=0, le=10**4
    )
    speed_sigma: float = knob(
        0.0, "Sets the standard deviation of the log of an actor's seconds per turn.", ge=0, le=10
    )
    join_s: float = knob(0.0, "Lets the actors join evenly over this many seconds.", ge=0)
    mtbf_h: float = knob(
        0.0,
        "Sets the mean hours between two failures of an actor. 0 means that none fails.",
        also=0,
        ge=0.01,
    )
    restart_s: float = knob(60.0, "Sets the seconds until a failed actor has restarted.", ge=0)
    failed_frac: float = knob(
        0.0, "Sets the share of episodes that fail by the environment.", ge=0, lt=1
    )
    slot_slowdown: float = knob(
        0.0,
        "Slows an episode by this share for each other episode that its actor plays at its start.",
        ge=0,
        le=1000,
    )
    delivery_s: float = knob(
        0.05, "Sets the seconds from an episode's end to its arrival at the learner.", ge=0
    )

    turn_s: float = knob(3.0, "Sets the median seconds of generation in a turn.", gt=0)
    turn_sigma: float = knob(
        0.4, "Sets the standard deviation of the log of an episode's seconds per turn.", ge=0, le=10
    )
    num_turns: float = knob(
        8.0, "Sets the median number of turns of an episode that no horizon truncates.", ge=1
    )
    num_turns_sigma: float = knob(
        0.6, "Sets the standard deviation of the log of an episode's number of turns.", ge=0, le=10
    )
    env_s: float = knob(0.5, "Sets the median seconds of the environment in a turn.", ge=0)
    tail_frac: float = knob(0.02, "Sets the share of episodes that are slow.", ge=0, lt=1)
    tail_factor: float = knob(10.0, "Multiplies the seconds of slow episodes by this factor.", ge=1)
    success: float = knob(
        0.5, "Sets the mean success over items, whose success differs.", gt=0, lt=1
    )
    turn_tokens: int = knob(
        300, "Sets the tokens of a turn that the learner counts, prompt and answer.", ge=1
    )
    step_s: float = knob(
        5.0, "Sets the seconds of a step without its tokens, including publishing.", ge=0
    )
    learner_tokens_per_s: float = knob(
        8000.0, "Sets the tokens that the learner trains on per second.", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig(RunConfig):
    """The configuration of `simulate`."""

    simulator: SimulatorSection = field(default_factory=SimulatorSection)
