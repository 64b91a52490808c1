"""The command `check-env`: plays an environment and reports problems for training."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain

from common.config.load import load_config, override_value
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError
from common.repository import ROOT
from envhub.env import EnvSpec, Style, UnknownItem
from tools.author import checks, episode_checks
from tools.author.episodes import Driver, RecordedPlay, spec_of
from tools.author.findings import Finding, Grade, Plays
from tools.author.seat_checks import check_seats
from tools.cli.command_line import ParsedCommand

NUM_ITEMS = 20
MAX_ITEMS = 10**5
OTHER_PROCESS_S = 120.0
USAGE = "check-env NAME|FILE.py:FUNCTION [items=N] [style=NAME] [key=value ...]"


def check_env(
    request: ParsedCommand,
    *,
    echo: Callable[[str], None],
    check_prompts: Callable[[RunConfig], str],
) -> int:
    """Print a line for each finding; return the exit code: 1 if a check fails.

    Args:
        check_prompts: returns a sentence about the lengths of first prompts, or raises
            ConfigError.

    Raises: ConfigError: no such environment, or a wrong option.
    """
    name, style, num, overrides = options_of(request, USAGE)
    failed = False
    spec = spec_of(name, overrides)
    with Driver(spec, style) as driver:
        all_findings = findings(driver, name, num, overrides)
        if spec.prompts is not None:
            lengths = prompt_lengths(spec, name, overrides, check_prompts)
            all_findings = chain(all_findings, lengths)
        for finding in all_findings:
            failed = failed or finding.grade is Grade.FAIL
            echo(f"{finding.grade.value:<5}{finding.name:<12}{finding.text}")
    echo("Fix each line marked FAIL before a run." if failed else "No check failed.")
    return 1 if failed else 0


def prompt_lengths(
    spec: EnvSpec, name: str, overrides: list[str], check_prompts: Callable[[RunConfig], str]
) -> Iterator[Finding]:
    """Yield whether all first prompts fit into the context of the given model."""
    if override_value(overrides, "model.path") is None:
        text = "lengths are not checked; give model.path=FOLDER and actor.max_model_len=TOKENS"
        yield Finding(Grade.NOTE, "prompts", text)
        return
    task = f"tasks=[{{env: {spec.name}, subset: {next(iter(spec.subsets))}}}]"
    environment = [] if name == spec.name else [f"envhub.envs=[{json.dumps(name)}]"]
    cfg = load_config(None, [task, *environment, *overrides])
    try:
        text = check_prompts(cfg) or f"model.path={cfg.model.path} has no tokenizer.json"
        yield Finding(Grade.OK, "prompts", text)
    except ConfigError as error:
        yield Finding(Grade.FAIL, "prompts", str(error))


def options_of(request: ParsedCommand, usage: str) -> tuple[str, Style, int, list[str]]:
    """Return the environment, the style, the number of items, and keys of the configuration."""
    words = [word for word in request.overrides if "=" not in word]
    given = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    style = given.pop("style", "instructed")
    num = given.pop("items", str(NUM_ITEMS))
    if len(words) != 1:
        raise ConfigError(f"run.py {usage}")
    if style not in [*Style]:
        raise ConfigError(f"style={style}: must be one of {', '.join(Style)}")
    if not (num.isascii() and num.isdigit() and 0 < int(num) <= MAX_ITEMS):
        raise ConfigError(f"items={num}: must be a number from 1 to {MAX_ITEMS}")
    return words[0], Style(style), int(num), [f"{key}={value}" for key, value in given.items()]


def findings(driver: Driver, name: str, num: int, overrides: list[str]) -> Iterator[Finding]:
    """Yield all findings. An environment that raises yields a last finding and ends the checks."""
    spec = driver.spec
    entry = [*checks.check_spec(spec)]
    yield from entry
    if any(each.grade is Grade.FAIL for each in entry):
        return
    items = checks.items_of(spec, num)
    try:
        protocol = [*checks.check_protocol(driver, items[0])]
        yield from protocol
        if any(each.grade is Grade.FAIL for each in protocol):
            return
        plays = checks.play_all(driver, items)
        yield from checks.check_items(driver, items)
        yield from checks.check_determinism(driver, plays)
        yield from checks.check_at_once(driver, plays)
        yield from _elsewhere(driver, name, plays, overrides)
        yield from episode_checks.check_rewards(spec, plays)
        yield from checks.check_actions(driver, items)
        check_play = check_seats if spec.seats > 1 else episode_checks.check_players
        yield from check_play(spec, plays)
        yield from episode_checks.check_speed(spec, plays)
        yield from episode_checks.check_texts(spec, plays)
    except (EnvError, UnknownItem) as error:
        yield Finding(Grade.FAIL, "raises", str(error))


def _elsewhere(driver: Driver, name: str, plays: Plays, overrides: list[str]) -> Iterator[Finding]:
    """Yield whether a process with another hash seed repeats the episodes exactly."""
    if not driver.spec.is_repeatable:
        return
    played = [[each.item_id, each.actions] for each in plays.all]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        found = subprocess.run(
            [sys.executable, "-m", "tools.author.check_env", name, driver.style, *overrides],
            input=json.dumps(played),
            env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(paths)},
            cwd=ROOT,
            capture_output=True,
            encoding="utf-8",
            timeout=OTHER_PROCESS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"another process did not repeat the episodes within {OTHER_PROCESS_S:g} s"
        yield Finding(Grade.FAIL, "determinism", text)
        return
    here = [digest(each) for each in plays.all]
    there = found.stdout.split()
    if len(there) != len(here):
        why = " ".join(found.stderr.split()[-30:])
        yield Finding(Grade.FAIL, "determinism", f"another process cannot play the episodes: {why}")
        return
    other = [e.item_id for e, a, b in zip(plays.all, here, there, strict=True) if a != b]
    if other:
        text = f"{other[0]} differs in another process (does it use hash(), set order or a clock?)"
        yield Finding(Grade.FAIL, "determinism", text)
    else:
        yield Finding(Grade.OK, "determinism", "episodes are the same in another process")


def digest(episode: RecordedPlay) -> str:
    """Return a hash of all observations and results of an episode."""
    return hashlib.sha256(
        json.dumps(checks.compared_part(episode), default=str).encode()
    ).hexdigest()


def main(argv: list[str]) -> None:
    """Repeat the episodes read from standard input and print a hash of each."""
    name, style, *overrides = argv
    with Driver(spec_of(name, overrides), Style(style)) as driver:
        for item_id, actions in json.load(sys.stdin):
            with driver.open(item_id) as episode:
                for action in actions:
                    episode.step(action)
            sys.stdout.write(f"{digest(episode)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
