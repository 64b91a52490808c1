"""The command `journal`: lists, verifies, exports and prunes the trajectories of a run.

It also copies the run to a store, and restores a run from its copy. All actions also work on a
running run.
"""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError
from common.formats.chat_template import fix_template
from common.repository import ROOT
from common.store.run_dir import RunDir, read_json
from common.text import counted
from learner.journal.journal import (
    PACKED_SUFFIX,
    journal_files,
    load_pruned,
    read_around_damage,
    read_journal,
    synced_end,
)
from learner.journal.upkeep import DAY_S, GB, RetentionLimits, prune_old
from learner.recovery.reward_log import read_group_rewards
from learner.recovery.step_log import PartName
from tools.cli.command_line import ParsedCommand
from tools.copies.copier import copy
from tools.copies.fetch import fetch_run
from tools.exchange.writing import FORMATS, load_framing, trainable_episodes, write

USAGE = (
    "journal RUN list|verify|export|prune|copy [to=FILE|URL]"
    " [--format json|agenttraj|sft|parquet|atif] [keep_gb=N] [keep_days=N] [every_s=N],"
    " or journal URL fetch [to=NAME]"
)
OPTIONS = {
    "export": {"to", "format"},
    "prune": {"keep_gb", "keep_days"},
    "copy": {"to", "every_s"},
    "fetch": {"to"},
}


def journal(request: ParsedCommand) -> int:
    """Run one of the actions; return the exit code: 1 if `verify` finds damage.

    Raises: ConfigError: an unknown run or action, or an invalid option. WireError: the journal is
        damaged.
    """
    actions = {"list": _list, "verify": _verify, "export": _export, "prune": _prune, "copy": copy}
    words = [word for word in request.overrides if "=" not in word]
    options = dict(word.split("=", 1) for word in request.overrides if "=" in word)
    if len(words) != 2 or words[1] not in (*actions, "fetch"):
        raise ConfigError(f"usage: run.py {USAGE}")
    runs = ROOT / options.pop("run.dir", "runs")
    if unknown := sorted(options.keys() - OPTIONS.get(words[1], set())):
        raise ConfigError(f"{unknown[0]}: {words[1]} has no such option; usage: run.py {USAGE}")
    if words[1] == "fetch":
        return fetch_run(words[0], options, runs=runs)
    folder = runs / words[0]
    run_dir = RunDir(root=folder if folder.exists() else Path(words[0]))
    is_starting = words[1] == "copy" and run_dir.root.is_dir()  # The learner makes the journal.
    if not run_dir.journal.is_dir() and not is_starting:
        raise ConfigError(f"{words[0]}: no run with a journal at {folder}")
    return actions[words[1]](run_dir, options)


def _needed_from(run_dir: RunDir) -> int:
    """Return the first file that a restart reads, 0 without a replay point."""
    if not run_dir.replay_point.exists():
        return 0
    remedy = "remove the file; a restart then reads the whole journal"
    position = read_json(run_dir.replay_point, {"position": dict}, remedy=remedy)["position"]
    number = position.get("segment")
    if not isinstance(number, int):
        raise ConfigError(f"{run_dir.replay_point}: damaged, it names no file; {remedy}")
    return number


def _list(run_dir: RunDir, _: dict[str, str]) -> int:
    """Print each file with its size, its age and whether a restart needs it."""
    needed = _needed_from(run_dir)
    total = 0
    for number, path in journal_files(run_dir.journal).items():
        stat = path.stat()
        total += stat.st_size
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stat.st_mtime))
        state = "packed" if path.suffix == PACKED_SUFFIX else "plain"
        why = "needed by a restart" if number >= needed else ""
        print(f"{number:06d}  {state:<7}{stat.st_size / 1e6:10.1f} MB  {when}  {why}".rstrip())
    pruned = load_pruned(run_dir.journal)
    synced = synced_end(run_dir.journal)
    if pruned.before:
        print(f"{pruned.text(run_dir.journal)}, {pruned.num_bytes / 1e6:.1f} MB")
    print(f"{total / 1e6:.1f} MB; acknowledged up to byte {synced.offset} of file {synced.file}")
    return 0


def _verify(run_dir: RunDir, _: dict[str, str]) -> int:
    """Read every record, and continue after damaged ones."""
    problems: list[str] = []
    names: set[str] = set()
    num_episodes = 0
    numbers = list(journal_files(run_dir.journal))
    first = load_pruned(run_dir.journal).before
    missing = sorted(set(range(first, max(numbers, default=first - 1) + 1)) - set(numbers))
    problems += [f"file {number} is missing" for number in missing]
    for number in numbers:
        count = 0
        for record in read_around_damage(run_dir.journal, number, is_last=number == numbers[-1]):
            if isinstance(record, str):
                problems.append(record)
                continue
            names.add(record.episode_id)
            count += 1
        num_episodes += count
        print(f"{number:06d}  {counted(count, 'episode')}")
    if not first:
        lost = [name for name in _consumed(run_dir) if name not in names]
        problems += [f"{name}: a step trained it, but the journal lacks it" for name in lost[:20]]
    for problem in problems:
        print(f"damaged: {problem}")
    verdict = counted(len(problems), "problem") if problems else "no problems"
    read = f"{counted(num_episodes, 'episode')} in {counted(len(numbers), 'file')}"
    print(f"{read}, {verdict}")
    return 1 if problems else 0


def _consumed(run_dir: RunDir) -> dict[str, int | None]:
    """Return by episode the version that was trained on it; None: its batch was skipped.

    Raises: ConfigError: the step log is damaged.
    """
    consumed: dict[str, int | None] = {}
    if not run_dir.steps.exists():
        return consumed
    with run_dir.steps.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                step = json.loads(line)
                if "pruned" in step:
                    continue
                version = None if step.get("skipped") else step["version"]
                names = (PartName.parse(name) for ids in step["groups"] for name in ids)
                consumed |= {name.episode_id: version for name in names}
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{run_dir.steps}: line {number} is damaged ({error!r})"
                ) from error
    return consumed


def _export(run_dir: RunDir, options: dict[str, str]) -> int:
    """Write every episode as one JSON line with the step that consumed it, or in another format.

    In a run with `groups.reward`, a line has the trained reward as `group_reward`; null for none.
    """
    if "to" not in options:
        raise ConfigError(f"export needs to=FILE; usage: run.py {USAGE}")
    target = Path(options["to"])
    format = options.get("format", "json")
    if format not in FORMATS:
        raise ConfigError(f"--format {format}: must be one of {', '.join(FORMATS)}")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"to={target}: the folder of this file does not exist; create it")
    partial = target.with_name(f".{target.name}.partial")
    if format != "json":
        fix_template(None, run_dir.read_prompt_variables())  # The folder has the run's template.
        framing = load_framing(run_dir.tokenizer, day=run_dir.read_date())
        with contextlib.ExitStack() as stack:
            stack.callback(partial.unlink, missing_ok=True)
            num = write(format, partial, trainable_episodes(run_dir.journal), framing)
            partial.replace(target)
        rows = counted(num, "row")
        print(f"wrote {rows} to {target}, without scripted play, held-out items and failures")
        return 0
    consumed = _consumed(run_dir)
    has_rewards = run_dir.group_rewards.exists()
    rewards = read_group_rewards(run_dir.group_rewards)
    num = 0
    with partial.open("w", encoding="utf-8") as out:
        for position, trajectory in read_journal(run_dir.journal):
            row = asdict(trajectory) | {
                "step": consumed.get(trajectory.episode_id),
                "segment": position.file,
                "offset": position.offset,
            }
            if has_rewards:
                reward = rewards.get(trajectory.group_id)
                row["group_reward"] = reward and reward.rewards.get(trajectory.member)
            out.write(json.dumps(row, default=_as_plain) + "\n")
            num += 1
    partial.replace(target)
    print(f"wrote {counted(num, 'episode')} to {target}")
    return 0


def _as_plain(value: Any) -> Any:
    """Return an array as a list, for JSON."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _prune(run_dir: RunDir, options: dict[str, str]) -> int:
    """Remove the oldest files over a limit, but none that a restart reads."""
    if not options:
        raise ConfigError(f"prune needs keep_gb=N or keep_days=N; usage: run.py {USAGE}")
    values = {key: _number(key, value) for key, value in options.items()}
    limits = RetentionLimits(
        keep_bytes=values["keep_gb"] * GB if "keep_gb" in values else None,
        keep_s=values["keep_days"] * DAY_S if "keep_days" in values else None,
    )
    before = load_pruned(run_dir.journal)
    pruned = prune_old(run_dir.journal, limits, before=_needed_from(run_dir))
    print(
        f"{counted(pruned.before - before.before, 'file')} pruned,"
        f" {(pruned.num_bytes - before.num_bytes) / 1e6:.1f} MB; files from"
        f" {_needed_from(run_dir)} on are kept, because a restart needs them"
    )
    return 0


def _number(key: str, value: str) -> float:
    """Return the number of an option. Raises: ConfigError: it is negative, or no number."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise ConfigError(f"{key}={value}: must be a number >= 0")
    return number
