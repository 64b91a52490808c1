"""Checks of `check-env` on finished episodes: reward, success, players, speed and texts."""

import math
import statistics
import unicodedata
from collections.abc import Callable, Iterator

from common.text import counted
from envhub.env import EnvSpec, Reward
from tools.author.checks import max_turns_of
from tools.author.episodes import RecordedPlay
from tools.author.findings import Finding, Grade, Plays, graded

CONTROL_TOKENS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "</s>", "<|eot_id|>")
MAX_CHARS = 20_000  # Maximum characters of one observation; most contexts hold less.
GROUP = 8  # Group size in the estimate of the signal.
SLOW_S = 0.2  # Maximum seconds of a step in the hub's own thread, see envhub.inline_step_s.


def check_rewards(spec: EnvSpec, plays: Plays) -> Iterator[Finding]:
    """Yield rewards out of range, and the meaning of reward and success in this environment."""
    step_rewards = [(each.item_id, r.reward) for each in plays.all for r in each.results]
    odd = [
        f"{item}: {reward!r} is not in [0, 1]"
        for item, reward in step_rewards
        if not (isinstance(reward, int | float) and math.isfinite(reward) and 0 <= reward <= 1)
    ]
    kind = "the sum of its rewards" if spec.reward is Reward.SUM else "the reward of its last step"
    best = max((reward for _, reward in step_rewards), default=0.0)
    yield from graded(
        "reward", odd, f"an episode's return is {kind}; the highest reward seen is {best:g}"
    )
    ends = [each.results[-1] for each in plays.all if each.is_over]
    if all(result.tells_success for result in ends):
        yield Finding(Grade.OK, "success", "reported by the environment, independent of the reward")
    else:
        text = "not reported (is_success=None): an ended episode with return 1 counts as solved"
        lost = f"; the highest here is {best:g}, so no episode counts" if 0 < best < 1 else ""
        yield Finding(Grade.FAIL if lost else Grade.NOTE, "success", text + lost)
    rising = [
        each.item_id
        for each in plays.all
        if spec.reward is Reward.LAST
        and len(each.results) > 1
        and max(r.reward for r in each.results) > each.results[-1].reward
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
    knows = [each for each in plays.by_expert if each.actions]
    if not knows:
        yield Finding(
            Grade.NOTE,
            "expert",
            "no expert_action, so no demonstrations for `sft` and no upper bound",
        )
    else:
        solved = sum(each.is_solved for each in knows)
        failed = next((each.item_id for each in knows if not each.is_solved), "")
        text = f"solves {solved} of {len(knows)}" + (f", but not {failed}" if failed else "")
        yield Finding(Grade.OK if solved == len(knows) else Grade.NOTE, "expert", text)
    if spec.has_references:
        yield from _check_references(knows)
    rate = statistics.fmean(each.is_solved for each in plays.by_chance)
    signal = 1 - rate**GROUP - (1 - rate) ** GROUP
    worths = {each.results[-1].reward for each in plays.by_chance if each.results}
    text = f"random valid actions solve {rate:.0%}"
    if len(worths) > 1:
        yield Finding(Grade.OK, "signal", f"{text}: {signal:.0%} of groups of {GROUP} have signal")
    else:
        why = "all episodes have the same return"
        easier = "warm-start with `sft`, give more turns, or add easier items"
        cure = "add harder items" if rate > 0.5 else easier
        yield Finding(Grade.NOTE, "signal", f"{text}, and {why}; {cure}")
    endless = sum(
        not each.is_over and len(each.results) < max_turns_of(spec, each.item_id)
        for each in plays.by_chance
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
        each for each in plays if each.is_over and not any(r.reward > 0 for r in each.results)
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
