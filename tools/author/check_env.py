"""The command `check-env`: plays an environment and reports problems for training."""

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from itertools import chain

from common.config.load import load_config, override_value
from common.errors import ConfigError, EnvError
from common.repository import CODE, ROOT
from common.text import counted
from envhub.env import EnvSpec, Reward, StepResult, Style, UnknownItem
from tools.author import checks
from tools.author.checks import Finding, Grade, Plays, graded, max_turns_of
from tools.author.episodes import Driver, RecordedPlay, spec_of
from tools.checks.environments import check_prompts
from tools.cli.command_line import ParsedCommand
from tools.dequantise.models import plain_models


def check_seats(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield results whose seats are wrong, and the mean reward of each seat in random play."""
    results = [(each.item_id, result) for each in plays.all for result in each.results]
    wrong = [f"{item}: {why}" for item, result in results if (why := _why_wrong(spec, result))]
    ends = [each.results[-1].seat_rewards for each in plays.by_chance if each.is_over]
    means = (
        [
            statistics.fmean(rewards[seat] for rewards in ends if rewards)
            for seat in range(spec.seats)
        ]
        if ends and not wrong
        else []
    )
    shown = ", ".join(f"{mean:.2f}" for mean in means) or "no rewards, it never ended"
    yield from graded("seats", wrong, f"{spec.seats} seats; random play gives them {shown}")


def _why_wrong(spec: EnvSpec, result: StepResult) -> str:
    """Return why the seats of a result are wrong; "" if they are not."""
    rewards = result.seat_rewards or []
    if len(rewards) != spec.seats:
        return f"seat_rewards={result.seat_rewards}, but there are {spec.seats} seats"
    if not all(math.isfinite(each) and 0 <= each <= 1 for each in rewards):
        return f"seat_rewards={result.seat_rewards} are not in [0, 1]"
    if not result.done and result.seat not in range(spec.seats):
        return f"seat={result.seat} moves next, but the seats are 0 to {spec.seats - 1}"
    return ""


CONTROL_TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "</s>", "<|eot_id|>")
MAX_CHARS = 20_000  # Maximum characters of one observation; most contexts hold less.
GROUP = 8  # Group size in the estimate of the signal.
SLOW_S = 0.2  # Maximum seconds of a step in the hub's own thread, see envhub.inline_step_s.


def check_reward_types(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield rewards that are no numbers, with which the other checks could not compute."""
    wrong = [
        f"{spec.name}, {play.item_id}: reward={result.reward!r:.80} is"
        f" {type(result.reward).__name__}; it must be a number (int or float)"
        for play in plays.all
        for result in play.results
        if not isinstance(result.reward, int | float)
    ]
    if wrong:
        yield from graded("reward", wrong, "")


def check_rewards(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield rewards out of range, and the meaning of reward and success in this environment."""
    step_rewards = [(play.item_id, r.reward) for play in plays.all for r in play.results]
    odd = [
        f"{item}: {reward!r} is not in [0, 1]"
        for item, reward in step_rewards
        if not (math.isfinite(reward) and 0 <= reward <= 1)
    ]
    kind = "the sum of its rewards" if spec.reward is Reward.SUM else "the reward of its last step"
    best = max((reward for _, reward in step_rewards), default=0.0)
    yield from graded(
        "reward", odd, f"an episode's return is {kind}; the highest reward seen is {best:g}"
    )
    ends = [play.results[-1] for play in plays.all if play.is_over]
    if all(result.tells_success for result in ends):
        yield Finding(Grade.OK, "success", "reported by the environment, independent of the reward")
    else:
        text = "not reported (is_success=None): an ended episode with return 1 counts as solved"
        lost = f"; the highest here is {best:g}, so no episode counts" if 0 < best < 1 else ""
        yield Finding(Grade.FAIL if lost else Grade.NOTE, "success", text + lost)
    rising = [
        play.item_id
        for play in plays.all
        if spec.reward is Reward.LAST
        and len(play.results) > 1
        and max(r.reward for r in play.results) > play.results[-1].reward
    ]
    if rising:
        yield Finding(
            Grade.NOTE,
            "reward",
            f"{rising[0]}: a step has a higher reward than the last step, but only the last"
            " one counts. Use reward=Reward.SUM in the EnvSpec to add all steps.",
        )


def check_players(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield the success rates of expert and random play, and the resulting advice."""
    knows = [play for play in plays.by_expert if play.actions]
    if not knows:
        yield Finding(
            Grade.NOTE,
            "expert",
            "no expert_action, so no demonstrations for `sft` and no upper bound",
        )
    else:
        solved = sum(play.is_solved for play in knows)
        failed = next((play.item_id for play in knows if not play.is_solved), "")
        text = f"solves {solved} of {len(knows)}" + (f", but not {failed}" if failed else "")
        yield Finding(Grade.OK if solved == len(knows) else Grade.NOTE, "expert", text)
    if spec.has_references:
        yield from _check_references(knows)
    rate = statistics.fmean(play.is_solved for play in plays.by_chance)
    signal = 1 - rate**GROUP - (1 - rate) ** GROUP
    worths = {play.results[-1].reward for play in plays.by_chance if play.results}
    text = f"random valid actions solve {rate:.0%}"
    if len(worths) > 1:
        yield Finding(Grade.OK, "signal", f"{text}: {signal:.0%} of groups of {GROUP} have signal")
    else:
        why = "all episodes have the same return"
        easier = "warm-start with `sft`, give more turns, or add easier items"
        cure = "add harder items" if rate > 0.5 else easier
        yield Finding(Grade.NOTE, "signal", f"{text}, and {why}; {cure}")
    endless = sum(
        not play.is_over and len(play.results) < max_turns_of(spec, play.item_id)
        for play in plays.by_chance
    )
    if endless:
        yield Finding(
            Grade.FAIL,
            "actions",
            counted(
                endless,
                "episode lacks valid actions before its end",
                "episodes lack valid actions before their end",
            ),
        )


def _check_references(plays: list[RecordedPlay]) -> Iterator[Finding]:
    """Yield the reference solutions whose return is 0, with the last observation."""
    worthless = [
        play for play in plays if play.is_over and not any(r.reward > 0 for r in play.results)
    ]
    if worthless:
        first = worthless[0]
        seen = " / ".join(result.observation for result in first.results)
        text = f"the reference solution has reward 0 in {counted(len(worthless), 'item')}"
        yield Finding(Grade.FAIL, "expert", f"{text}; {first.item_id} answers {seen!r:.300}")


def check_speed(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield the duration of a turn."""
    if not plays.step_s:
        yield Finding(Grade.FAIL, "speed", "no step was played")
        return
    median = statistics.median(plays.step_s)
    worst = max(plays.step_s)
    text = f"a turn takes {median * 1e3:.2f} ms, {worst * 1e3:.2f} ms in the slowest episode"
    is_slow = worst > SLOW_S
    yield Finding(Grade.NOTE if is_slow else Grade.OK, "speed", text)


def check_texts(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield texts that cause trouble for a tokenizer, a terminal or a policy."""
    problems: list[str] = []
    tests: list[tuple[str, Callable[[str], object]]] = [
        ("is empty", lambda text: not text.strip()),
        (
            "has an unpaired surrogate",
            lambda text: any(unicodedata.category(c) == "Cs" for c in text),
        ),
        ("has control characters", lambda text: any(_is_control(c) for c in text)),
        ("has a control token", lambda text: any(token in text for token in CONTROL_TOKENS)),
        ("has an address in memory", lambda text: " at 0x" in text),
        (f"is longer than {MAX_CHARS} characters", lambda text: len(text) > MAX_CHARS),
    ]
    seen = [(each.item_id, text) for each in plays.all for text in each.texts()]
    for what, is_wrong in tests:
        problems += [f"{item}: a text {what}" for item, text in seen if is_wrong(text)][:1]
    longest = max(len(text) for _, text in seen)
    yield from graded(
        "texts", problems, f"{counted(len(seen), 'observation')}, {longest} characters at most"
    )


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc" and character not in "\n\t"


NUM_ITEMS = 20
MAX_ITEMS = 10**5
OTHER_PROCESS_S = 120.0
USAGE = "check-env NAME|FILE.py:FUNCTION [items=N] [style=NAME] [key=value ...]"


def check_env(request: ParsedCommand) -> int:
    """Print a line for each finding; return the exit code: 1 if a check fails.

    Raises: ConfigError: no such environment, or a wrong option.
    """
    name, style, num, overrides = options_of(request, USAGE)
    failed = False
    spec = spec_of(name, overrides)
    with Driver(spec, style) as driver:
        all_findings = findings(driver, name, num, overrides)
        if spec.prompts is not None:
            lengths = prompt_lengths(spec, name, overrides)
            all_findings = chain(all_findings, lengths)
        for finding in all_findings:
            failed = failed or finding.grade is Grade.FAIL
            print(f"{finding.grade.value:<5}{finding.name:<12}{finding.text}")
    print("Fix each line marked FAIL before a run." if failed else "No check failed.")
    return 1 if failed else 0


def prompt_lengths(spec: EnvSpec, name: str, overrides: list[str]) -> Iterator[Finding]:
    """Yield whether all first prompts fit into the context of the given model."""
    if override_value(overrides, "model.path") is None:
        text = "lengths are not checked; give model.path=FOLDER and actor.max_model_len=TOKENS"
        yield Finding(Grade.NOTE, "prompts", text)
        return
    task = f"tasks=[{{env: {spec.name}, subset: {next(iter(spec.subsets))}}}]"
    environment = [] if name == spec.name else [f"envhub.envs=[{json.dumps(name)}]"]
    cfg = load_config(None, [task, *environment, *overrides])
    try:
        cfg = plain_models(cfg, is_dry=True)
        text = check_prompts(cfg) or f"model.path={cfg.model.path} has no tokenizer.json"
        yield Finding(Grade.OK, "prompts", text)
    except ConfigError as error:
        yield Finding(Grade.FAIL, "prompts", str(error))


def options_of(request: ParsedCommand, usage: str) -> tuple[str, Style, int, list[str]]:
    """Return the environment, the style, the number of items, and keys of the configuration."""
    words = [word for word in request.overrides if "=" not in word]
    settings = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    style = settings.pop("style", "instructed")
    num = settings.pop("items", str(NUM_ITEMS))
    if len(words) != 1:
        raise ConfigError(f"run.py {usage}")
    if style not in [*Style]:
        raise ConfigError(f"style={style}: must be one of {', '.join(Style)}")
    if not (num.isascii() and num.isdigit() and 0 < int(num) <= MAX_ITEMS):
        raise ConfigError(f"items={num}: must be a number from 1 to {MAX_ITEMS}")
    return words[0], Style(style), int(num), [f"{key}={value}" for key, value in settings.items()]


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
        wrong = [*check_reward_types(spec, plays)]
        yield from wrong
        if wrong:
            return
        yield from checks.check_items(driver, items)
        yield from checks.check_determinism(driver, plays)
        yield from checks.check_at_once(driver, plays)
        yield from checks.check_saving(driver, plays)
        yield from _elsewhere(driver, name, plays, overrides)
        yield from check_rewards(spec, plays)
        yield from checks.check_actions(driver, items)
        check_play = check_seats if spec.seats > 1 else check_players
        yield from check_play(spec, plays)
        yield from check_speed(spec, plays)
        yield from check_texts(spec, plays)
    except (EnvError, UnknownItem) as error:
        yield Finding(Grade.FAIL, "raises", str(error))


def _elsewhere(driver: Driver, name: str, plays: Plays, overrides: list[str]) -> Iterator[Finding]:
    """Yield whether a process with another hash seed repeats the episodes exactly."""
    if not driver.spec.is_repeatable:
        return
    played = [[each.item_id, each.actions] for each in plays.all]
    paths = [str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        completed = subprocess.run(
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
    there = completed.stdout.split()
    if len(there) != len(here):
        why = " ".join(completed.stderr.split()[-30:])
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
