"""The commands `show` and `replay`: episodes as conversations, on a terminal or in a pipe."""

import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import ConfigError, WireError
from common.repository import ROOT
from common.text import counted, plain
from tools.cli.command_line import ParsedCommand
from tools.dashboard.reading.index_cache import cache_folder
from tools.dashboard.reading.rows import KEYS
from tools.dashboard.reading.sources import Source, open_source
from tools.dashboard.words import duration

NUM_SHOWN = 5
SHOW = "show RUN [--item ID] [--group ID] [--failed] [--best] [num=N] [FILTER=VALUE ...]"
# Titles of segment kinds; other kinds use their own names.
MARKS = {"prompt": "task", "observation": "env", "action": "agent"}
DIM = "\x1b[2m"
BOLD = "\x1b[1m"
RESET = "\x1b[0m"
SHADES = (196, 208, 220, 148, 40)  # Codes of the 256-colour palette, from improbable to certain.


def show(request: ParsedCommand) -> int:
    """Print matching episodes as conversations; return 1 if none matches.

    Raises: ConfigError: no such run, filter or number.
    """
    words = [word for word in request.overrides if "=" not in word]
    options = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    if len(words) != 1:
        raise ConfigError(f"show: expects one run. Usage: run.py {SHOW}")
    num = options.pop("num", str(NUM_SHOWN))
    if not (num.isascii() and num.isdigit() and int(num) > 0):
        raise ConfigError(f"num={num}: expects a number of episodes, at least 1")
    runs = ROOT / options.pop("run.dir", "runs")
    if unknown := sorted(options.keys() - set(KEYS)):
        raise ConfigError(f"{unknown[0]}: unknown filter. Use one of: num, {', '.join(KEYS)}.")
    source = _read(words[0], runs)
    page = source.page({**options, **request.filters}, start=0, num=int(num))
    for row in page["rows"]:
        for line in _conversation(source, row["id"], is_coloured=False):
            print(line)
        print("")
    shown = len(page["rows"])
    matching = counted(page["total"], "matching episode")
    print(f"{shown} of {matching} shown; {counted(source.rows.num, 'episode')} in all")
    return 0 if shown else 1


def replay(request: ParsedCommand) -> int:
    """Print one episode turn by turn, in colour on a terminal; return the exit code.

    Raises: ConfigError: no such run or episode.
    """
    words = [word for word in request.overrides if not word.startswith("run.dir=")]
    folder = [word for word in request.overrides if word.startswith("run.dir=")]
    if len(words) != 2:
        raise ConfigError("replay: expects a run and an episode. Usage: run.py replay RUN EPISODE")
    runs = ROOT / (folder[-1].partition("=")[2] if folder else "runs")
    source = _read(words[0], runs)
    if words[1] not in source.rows.row_of:
        near = next((each for each in source.rows.ids if words[1] in each), "")
        lists = f"`run.py show {words[0]}` lists episodes."
        hint = f"A similar id is {near}." if near else lists
        raise ConfigError(f"{words[1]}: run {words[0]} has no such episode. {hint}")
    is_coloured = sys.stdout.isatty()
    for line in _conversation(source, words[1], is_coloured=is_coloured):
        print(line)
    return 0


def _read(word: str, runs: Path) -> Source:
    """Return a source after reading it completely. Problems are printed as notes."""
    source = open_source(word, runs=runs, cache=cache_folder())
    began = time.monotonic()
    is_terminal = sys.stderr.isatty()
    while source.refresh(budget_s=1.0):
        share = source.summary()["indexed"]
        took_s = time.monotonic() - began
        left = f", {duration(took_s / share - took_s)} left" if share else ""
        start, end = ("\r", "") if is_terminal else ("", "\n")
        print(
            f"{start}reading the journal: {share:.0%}{left}", end=end, file=sys.stderr, flush=True
        )
    if is_terminal and time.monotonic() - began > 1.0:
        print("\r" + " " * 50, end="\r", file=sys.stderr)
    source.refresh()
    for problem in source.summary()["problems"]:
        print(f"note: {plain(problem)}")
    return source


def _conversation(source: Source, episode_id: str, *, is_coloured: bool) -> Iterator[str]:
    """Yield the lines of an episode: a headline, then each message with its sender."""
    try:
        episode = source.episode(episode_id)
    except WireError as error:
        yield f"{episode_id}: the record is damaged: {error}"
        return
    yield _headline(episode)
    for segment in episode["segments"]:
        name = MARKS.get(segment["kind"], segment["kind"])
        turn = f" {segment['turn'] + 1}" if segment["kind"] != "prompt" else ""
        note = ", invalid action" if segment.get("invalid") else ""
        note += _versions(segment)
        text = _coloured(segment) if is_coloured else plain("".join(segment["texts"]))
        title = f"--- {name}{turn}{note}"
        yield f"{BOLD}{title}{RESET}" if is_coloured else title
        dim = is_coloured and "logprobs" not in segment
        yield f"{DIM}{text.strip()}{RESET}" if dim else text.strip()


def _headline(episode: dict[str, Any]) -> str:
    """Return the headline of an episode."""
    advantage = episode.get("advantage")
    trained = episode.get("group_reward")
    parts = [
        f"=== {episode['id']}",
        f"{episode['env']} {episode['item']}".strip(),
        f"reward {episode['reward']:.3g}",
        "" if trained is None else f"group reward {trained:.3g}",
        "" if advantage is None else f"advantage {advantage:+.3g}",
        "solved" if episode["success"] else "not solved",
        counted(episode["turns"], "turn"),
        episode["end"] and f"ended: {episode['end']}",
        episode["outcome"] + (f" ({episode['cause']})" if episode["cause"] else ""),
    ]
    return plain(" · ".join(part for part in parts if part))


def _versions(segment: dict[str, Any]) -> str:
    runs: list[list[int]] = segment.get("versions") or []
    return f" (version {' -> '.join(str(version) for version, _ in runs)})" if runs else ""


def _coloured(segment: dict[str, Any]) -> str:
    """Return the text of a segment. Sampled tokens are coloured by their probabilities."""
    if "logprobs" not in segment:
        return plain("".join(segment["texts"]))
    parts: list[str] = []
    last = len(SHADES) - 1
    for text, logprob in zip(segment["texts"], segment["logprobs"], strict=False):
        shade = SHADES[round(min(1.0, math.exp(min(0.0, logprob))) * last)]
        parts.append(f"\x1b[38;5;{shade}m{plain(text)}")
    return "".join(parts) + RESET
