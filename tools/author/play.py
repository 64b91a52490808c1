"""The command `play`: one episode played by hand in a terminal or through a pipe."""

from collections.abc import Iterable
from dataclasses import replace

from common.errors import ConfigError, EnvError
from common.text import plain
from envhub.env import StepResult, UnknownItem
from tools.author.check_env import options_of
from tools.author.episodes import Driver, RecordedPlay, spec_of
from tools.cli.command_line import ParsedCommand

SHOWN = 12  # Maximum number of valid actions in a list.
USAGE = "play NAME|FILE.py:FUNCTION [item=ID] [style=NAME] [key=value ...]"
KEYS = "Enter an action, or ? (valid actions), ! (the expert's), * (the whole state), q (quit)"


def play(request: ParsedCommand, *, lines: Iterable[str]) -> int:
    """Play one episode; return 0 if it was solved, else 1.

    Raises: ConfigError: no such environment or item, a wrong option, or the environment failed.
    """
    wanted = [word.removeprefix("item=") for word in request.overrides if word.startswith("item=")]
    others = [word for word in request.overrides if not word.startswith("item=")]
    name, style, _, overrides = options_of(replace(request, overrides=others), USAGE)
    spec = spec_of(name, overrides)
    item_id = wanted[-1] if wanted else f"{next(iter(spec.subsets))}-train-0"
    try:
        with Driver(spec, style) as driver, driver.open(item_id) as episode:
            print(f"{spec.name} {item_id}. {KEYS}")
            print(plain("\n".join(filter(None, [spec.instruction.get(style, ""), episode.first]))))
            for line in lines:
                if line.strip() == "q" or _turn(episode, line.rstrip("\n")):
                    break
            return 0 if episode.is_solved else 1
    except (EnvError, UnknownItem) as error:
        raise ConfigError(f"{name}: {error}") from error


def _turn(episode: RecordedPlay, line: str) -> bool:
    """Process one line; return whether the episode has ended."""
    match line.strip():
        case "?":
            actions = episode.call("valid_actions")
            remainder = f" ... {len(actions) - SHOWN} more" if len(actions) > SHOWN else ""
            print(plain(f"valid: {' | '.join(actions[:SHOWN])}{remainder}"))
        case "!":
            print(plain(f"expert: {episode.call('expert_action') or 'no action'}"))
        case "*":
            print(plain(episode.call("render")))
        case _:
            print(_result_text(episode.step(line)))
    return episode.is_over


def _result_text(result: StepResult) -> str:
    """Return an observation with its reward and flags."""
    notes = [f"reward {result.reward:g}"]
    notes += [] if result.is_valid else ["invalid action"]
    notes += [f"ended, {'solved' if result.is_success else 'not solved'}"] if result.done else []
    return plain(f"{result.observation}\n[{', '.join(notes)}]")
