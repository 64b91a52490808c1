"""The section `log`: log levels, the terminal display, and the destination of metrics."""

from dataclasses import dataclass
from enum import StrEnum

from common.config.knobs import FUNCTION, HOST, WORD, knob

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


class TrackerName(StrEnum):
    """Trackers that receive the metrics of a run.

    wandb: see `log.wandb`. tensorboard: event files in the folder tensorboard of the run. mlflow:
    at MLFLOW_TRACKING_URI, else in the file mlflow.db beside the runs. trackio: in TRACKIO_DIR.
    A class or a function of your own makes an object with `send(step, values)` and `close()`.
    """

    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """Log levels, the terminal display, and the destination of metrics."""

    to: list[TrackerName | str] = knob(
        [TrackerName.WANDB],
        "Lists the trackers that receive the metrics, also your own. Each needs its package.",
        form=FUNCTION,
    )
    wandb: WandbMode = knob(WandbMode.AUTO, "Selects how metrics are sent to Weights & Biases.")
    wandb_project: str = knob(
        "longstride",
        "Names the project of the trackers, which is an experiment in MLflow.",
        form=WORD,
    )
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
