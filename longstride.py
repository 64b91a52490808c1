"""The Python interface: `from longstride import train, evaluate, Policy, Run`."""

from common.errors import ConfigError, LongstrideError
from tools.api.commands import EvalResult, Training, evaluate, train
from tools.api.policy import ChatFailed, ChatReply, Policy
from tools.api.program import ProgramFailed
from tools.api.runs import Checkpoint, Episode, Records, Run

__all__ = [
    "ChatFailed",
    "ChatReply",
    "Checkpoint",
    "ConfigError",
    "Episode",
    "EvalResult",
    "LongstrideError",
    "Policy",
    "ProgramFailed",
    "Records",
    "Run",
    "Training",
    "evaluate",
    "train",
]
