"""The section `envhub`: the environment hub."""

from collections.abc import Iterator
from dataclasses import dataclass

from common.config.knobs import ENV_NAME, HOST, URL, Contradiction, knob, seconds
from common.formats.action_size import DEFAULT_ACTION_MIB, MOST_ACTION_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvhubSection:
    """The environment hub."""

    envs: list[str] = knob(
        [], "Lists the environments to serve. [] means those of the tasks.", form=ENV_NAME
    )
    host: str = knob("127.0.0.1", "Sets the address at which the hub listens.", form=HOST)
    port: int = knob(0, "Sets the port of the hub. 0 chooses a free one.", ge=0, le=65535)
    url: str = knob("", "Names the URL of a hub to use. Empty starts one.", form=URL, also="")
    is_started: bool = knob(
        True, "Starts a hub beside a run if envhub.url is empty. `false` waits for hubs that join."
    )
    advertise: str = knob(
        "",
        "Sets the host name by which other nodes reach the hub. Empty detects it.",
        form=HOST,
        also="",
    )
    token: str = knob(
        "",
        "Sets the bearer token of the hub at envhub.url, or of a hub that is started alone. Empty "
        "uses the run's token, or none.",
    )
    style: str = knob(
        "auto",
        "Selects the wording of instruction and observations. instructed explains the rules, the "
        "actions and the form of an answer. auto means the prompt_style in config.json of "
        "model.path, else instructed.",
        one_of=("auto", "compact", "instructed", "agentgym"),
    )
    session_idle_s: float = seconds(
        600.0, "Closes a session without requests after this many seconds.", ge=1
    )
    capacity: int = knob(4096, "Limits the sessions of each environment.", ge=1, le=10**6)
    max_sessions: int = knob(
        16_384, "Limits the sessions of the hub, over all environments.", ge=1, le=10**6
    )
    step_timeout_s: float = seconds(
        30.0, "Limits the seconds in which an environment must perform a step.", gt=0
    )
    max_action_mib: int = knob(
        DEFAULT_ACTION_MIB,
        "Limits the size of one action, in MiB. A larger action is invalid, and the policy reads "
        "the reason.",
        ge=1,
        le=MOST_ACTION_MIB,
    )
    inline_step_s: float = seconds(
        0.2, "Moves an environment to worker processes once three of its steps took longer.", gt=0
    )
    agentgym_idle_s: float = seconds(
        0.0,
        "Closes a session on AgentGym's routes without requests after this many seconds. 0 means "
        "session_idle_s.",
        ge=0,
    )
    agentgym_queue_s: float = seconds(
        120.0, "Limits the seconds that a create or reset on AgentGym's routes waits.", ge=0
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.agentgym_idle_s > self.session_idle_s:
            law = f"must be <= envhub.session_idle_s={self.session_idle_s:g}"
            yield "agentgym_idle_s", self.agentgym_idle_s, law
