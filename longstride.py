"""The Python interface: `from longstride import train, evaluate, Policy, Run`."""

import sys
from pathlib import Path

try:
    from common.errors import ConfigError, LongstrideError
    from tools.api.commands import EvalResult, Training, evaluate, train
    from tools.api.policy import ChatFailed, ChatReply, Policy
    from tools.api.program import ProgramFailed
    from tools.api.runs import Checkpoint, Episode, Records, Run
except ImportError as error:  # A module of the user may have the name of a package of Longstride.
    for name in ("actor", "common", "envhub", "learner", "scheduler", "tools"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and Path(path).resolve().parent != Path(__file__).resolve().parent / name:
            raise ImportError(
                f"{path}: Longstride has a package of the same name, {name!r}, and Python finds"
                " this module in its place; rename it, or start the script in another folder"
            ) from error
    raise

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

if __name__ == "__main__":  # `python -m longstride` is the console script.
    from run import run

    run()
