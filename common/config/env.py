"""The section `env`: a server of AgentGym or OpenEnv as an environment of the run."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from common.config.knobs import URL, WORD, Contradiction, knob, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """A server of AgentGym or OpenEnv as an environment of the run, named by its dialect."""

    url: str = knob(
        "", "Names the URL of the server, such as http://10.0.0.5:36001.", form=URL, also=""
    )
    dialect: str = knob(
        "",
        "Selects the protocol: openenv, or an environment of AgentGym such as textcraft.",
        form=WORD,
        also="",
    )
    train_items: str = knob(
        "", "Names a file of AgentGym-RL with the training items. With OpenEnv it names a split."
    )
    test_items: str = knob(
        "", "Names a file of AgentEval with the test items. With OpenEnv it names a split."
    )
    num_train: int = knob(
        -1, "Uses this many of the training items, evenly spread. -1 uses all.", ge=-1, le=10**7
    )
    num_test: int = knob(
        -1, "Uses this many of the test items, evenly spread. -1 uses all.", ge=-1, le=10**7
    )
    max_turns: int = knob(30, "Limits the turns of an episode.", ge=1, le=10**5)
    timeout_s: float = seconds(
        60.0, "Limits the seconds in which the server must answer a request.", gt=0
    )
    max_sessions: int = knob(64, "Limits the live episodes of the server.", ge=1)
    action_field: str = knob(
        "",
        "Names the field of an OpenEnv action that receives the agent's text. Empty: the only "
        "required field receives it, otherwise the agent writes JSON.",
    )
    observation_field: str = knob(
        "",
        "Names the field of an OpenEnv observation that the agent reads. Empty shows the whole "
        "observation.",
    )
    reward: str = knob(
        "last",
        "Selects the reward of an OpenEnv episode: its last reward, or the sum of all.",
        one_of=("last", "sum"),
    )
    min_reward: float = knob(
        0.0, "Sets the reward of an OpenEnv episode that is mapped to 0.", ge=-1e6, le=1e6
    )
    max_reward: float = knob(
        1.0, "Sets the reward of an OpenEnv episode that is mapped to 1.", ge=-1e6, le=1e6
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if bool(self.url) != bool(self.dialect):
            yield "url", self.url, "env.url and env.dialect need each other; set both or neither"
        if self.min_reward >= self.max_reward:
            yield "max_reward", self.max_reward, "must be > env.min_reward"
        of_openenv = ("action_field", "observation_field", "reward", "min_reward", "max_reward")
        for option in fields(self) if self.dialect != "openenv" else ():
            if (
                option.name in of_openenv
                and (value := getattr(self, option.name)) != option.default
            ):
                yield option.name, value, "has no effect without env.dialect=openenv"
