"""Sections of the configuration for the parts beside learner and actors: hub, log, journal, Ray."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import ENV_NAME, HOST, LABEL, RAY, URL, WORD, Contradiction, knob, seconds
from common.formats.action_size import DEFAULT_ACTION_MIB, MOST_ACTION_MIB

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


class WandbMode(StrEnum):
    """Connection to Weights & Biases.

    auto: online if the user is logged in, else offline. online: sends metrics during the run.
    offline: writes them to the run directory. disabled: writes none.
    """

    AUTO = "auto"
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"


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
    session_lease_s: float = seconds(
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
        0.2, "Moves an environment to worker processes if its steps take longer.", gt=0
    )
    agentgym_lease_s: float = seconds(
        0.0,
        "Closes a session on AgentGym's routes without requests after this many seconds. 0 means "
        "session_lease_s.",
        ge=0,
    )
    agentgym_queue_s: float = seconds(
        120.0, "Limits the seconds that a create or reset on AgentGym's routes waits.", ge=0
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.agentgym_lease_s > self.session_lease_s:
            law = f"must be <= envhub.session_lease_s={self.session_lease_s:g}"
            yield "agentgym_lease_s", self.agentgym_lease_s, law


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """Log levels, the terminal display, and the destination of metrics."""

    wandb: WandbMode = knob(WandbMode.AUTO, "Selects how metrics are sent to Weights & Biases.")
    wandb_project: str = knob("longstride", "Names the project of Weights & Biases.", form=WORD)
    level: str = knob("INFO", "Logs messages of this level and above.", one_of=LOG_LEVELS)
    max_mb: int = knob(
        100, "Limits a role's log file, in MB. A new file then begins; one old file is kept.", ge=1
    )
    live: bool = knob(True, "Shows the live display if the output is a terminal.")
    metrics_port: int = knob(
        0,
        "Serves the metrics of all roles for Prometheus at this port during `train`. The bearer "
        "token is in keys/metrics_token of the run. 0 turns it off.",
        ge=0,
        le=65535,
    )
    metrics_host: str = knob(
        "127.0.0.1", "Sets the address at which the metrics are served.", form=HOST
    )
    otlp_every_s: float = seconds(
        0.0,
        "Sends the metrics of all roles by OTLP every this many seconds during `train`, to the "
        "collector in the variable OTEL_EXPORTER_OTLP_ENDPOINT. 0 turns it off.",
        also=0,
        ge=1,
        le=86_400,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSection:
    """Retention of trajectories on disk, and the run's copy in a store.

    Files for a restart are never changed.
    """

    segment_mb: int = knob(
        256,
        "Sets the size of a journal file, in MB. Compression and removal handle whole files.",
        ge=1,
        le=4096,
    )
    compress: bool = knob(
        True, "Compresses files that no restart reads, while the learner is idle."
    )
    keep_gb: float = knob(
        100.0,
        "Limits the size of the journal, in GB. The oldest files are removed first. 0 keeps all.",
        ge=0,
        le=1e6,
    )
    keep_days: float = knob(
        0.0, "Removes files whose last episode is older than these days. 0 keeps all.", ge=0, le=1e5
    )
    copy_to: str = knob(
        "",
        "Copies the journal, the checkpoints and the state of the run to this folder or URL during "
        "`train`, such as /mnt/copies or s3://bucket/runs. Empty makes no copy.",
    )
    copy_every_s: float = seconds(
        30.0, "Sets the seconds between two copies of the run.", ge=0.1, le=86_400
    )
    copy_stop_timeout_s: float = seconds(
        60.0, "Limits the seconds after the end of the run in which the rest is copied.", ge=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySection:
    """Placement of roles by Ray. Scheduler and rank 0 always run on the run directory's node."""

    address: str = knob(
        "",
        "Names the address of a cluster. Empty uses RAY_ADDRESS, or starts a cluster on this "
        "machine.",
        form=RAY,
        also="",
    )
    actor_labels: list[str] = knob(
        [], "Lists the labels that the node of an engine must have.", form=LABEL
    )
    envhub_labels: list[str] = knob(
        [], "Lists the labels that the node of the hub must have.", form=LABEL
    )
    learner_labels: list[str] = knob(
        [], "Lists the labels that each further node of the learner must have.", form=LABEL
    )
    learner_cpus: float = knob(
        1.0, "Reserves this many CPUs of each of its nodes for the learner.", gt=0, le=10_000
    )
    actor_cpus: float = knob(
        1.0, "Reserves this many CPUs of its node for each actor.", gt=0, le=10_000
    )
    envhub_cpus: float = knob(
        1.0, "Reserves this many CPUs of its node for the hub.", gt=0, le=10_000
    )
    place_timeout_s: float = seconds(
        300.0,
        "Limits the seconds to find room for all nodes of the learner, or for the hub. Actors wait"
        " without a limit.",
        gt=0,
    )
