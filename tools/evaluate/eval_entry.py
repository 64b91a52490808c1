"""One row of an evaluation: the policy's identity, its finished episodes, and its tables."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.config.actor import ENDPOINT, RANDOM, ActorSection, ContextKind
from common.config.eval import EvalSection
from common.config.model import ModelSection
from common.config.policy import PolicySection
from common.errors import ConfigError
from common.formats.chat_template import names_date, template_at
from common.ids import subset_of
from common.repository import ROOT
from common.store.run_dir import RunDir, write_atomically, write_json
from common.wire.messages import Trajectory
from learner.journal.journal import read_journal
from tools.evaluate.planned import PlannedEpisode
from tools.evaluate.scores import ItemPlays, all_scores
from tools.evaluate.table import as_markdown

DIGEST_CHARS = 10


def describe_policy(
    policy: PolicySection, model: ModelSection, actor: ActorSection, *, style: str
) -> dict[str, Any]:
    """Return the policy and all settings that influence its episodes."""
    if policy.url:
        return {
            "style": style,
            "source": policy.url,
            "model": policy.model,
            "temperature": policy.temperature,
            "max_turn_tokens": policy.max_turn_tokens,
            **actor.of_answers(),
            **_of_seats(actor),
        }
    files = sorted([*Path(model.path).glob("*.safetensors"), *Path(model.path).glob("*.json")])
    context = {"context": actor.context.value, "context_turns": actor.context_turns}
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return {
        "style": style,
        "source": "engine",
        "model": model.source or model.path,
        "files": hashlib.blake2b(json.dumps(stats).encode(), digest_size=8).hexdigest(),
        "dtype": model.dtype,
        "temperature": actor.temperature,
        "max_turn_tokens": actor.max_turn_tokens,
        "max_model_len": actor.max_model_len,
        **({} if actor.context is ContextKind.FULL else context),
        **({"date": model.date} if names_date(Path(model.path), template_at(model, ROOT)) else {}),
        **_of_prompts(model, actor),
        **({"agent": list(actor.agent)} if actor.endpoint else {}),
        **actor.of_answers(),
        **_of_seats(actor),
    }


def _of_seats(actor: ActorSection) -> dict[str, Any]:
    """Return the non-default seats and opponents of an evaluation."""
    seats = actor.seats
    settings: dict[str, Any] = {}
    if seats.trained:
        settings["seats"] = seats.trained
    if seats.eval_opponents != [RANDOM]:
        settings["opponents"] = seats.eval_opponents
    if ENDPOINT in seats.eval_opponents:
        settings["opponent_model"] = [seats.url, seats.model]
    return settings


def _of_prompts(model: ModelSection, actor: ActorSection) -> dict[str, Any]:
    """Return the non-default settings of prompts."""
    settings = {
        "chat_template": model.chat_template,
        "chat_template_kwargs": model.chat_template_kwargs,
        "keep_thinking": actor.keep_thinking.value,
    }
    return {name: value for name, value in settings.items() if value and value != "all"}


def digest_of(policy: dict[str, Any]) -> str:
    """Return a short name of a policy, a hash of its whole description."""
    text = json.dumps(policy, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:DIGEST_CHARS]


def read_finished(journal: Path, plans: Sequence[PlannedEpisode]) -> set[str]:
    """Return the planned episodes that are in the journal without an infrastructure failure."""
    return {
        episode_id
        for episode_id, trajectory in _read(journal, plans).items()
        if not trajectory.end_reason.is_infrastructure_failure
    }


def read_plays(journal: Path, plans: Sequence[PlannedEpisode]) -> list[ItemPlays]:
    """Return the results of every item, in the order of the plans."""
    played = _read(journal, plans)
    by_item: dict[tuple[str, str], ItemPlays] = {}
    for plan in plans:
        new = ItemPlays(env=plan.env, subset=subset_of(plan.item_id), item_id=plan.item_id)
        entry = by_item.setdefault((plan.env, plan.item_id), new)
        if (trajectory := played.get(plan.episode_id)) is None:
            entry.num_missing += 1
        else:
            entry.add(trajectory)
    return list(by_item.values())


def _read(journal: Path, plans: Sequence[PlannedEpisode]) -> dict[str, Trajectory]:
    """Return the last result of each planned episode. A failure never replaces a completed one."""
    wanted = {plan.episode_id for plan in plans}
    found: dict[str, Trajectory] = {}
    for _, trajectory in read_journal(journal):
        known = found.get(trajectory.episode_id)
        is_known = known is not None and not known.end_reason.is_infrastructure_failure
        if trajectory.episode_id in wanted and not is_known:
            found[trajectory.episode_id] = trajectory
    return found


def make_entry(
    cfg: EvalSection, label: str, policy: dict[str, Any], plays: Sequence[ItemPlays]
) -> dict[str, Any]:
    """Return the row of one policy in the format of eval.json."""
    return {
        "digest": digest_of(policy),
        "label": cfg.label or label,
        "policy": policy,
        "k": cfg.k,
        "items": cfg.items.value,
        "num_items": len(plays),
        **all_scores(plays, k=cfg.k),
    }


def write_entry(run_dir: RunDir, entry: dict[str, Any]) -> str:
    """Add the row to eval.json, or replace the row of the same policy; return eval.md's text.

    Raises: ConfigError: eval.json was not written by this command.
    """
    path = run_dir.root / "eval.json"
    entries: list[dict[str, Any]] = []
    if path.exists():
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a file of evaluations ({error!r}); move it") from error
    digests = [known["digest"] for known in entries]
    if entry["digest"] in digests:
        entries[digests.index(entry["digest"])] = entry
    else:
        entries.append(entry)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    text = as_markdown(entries)
    write_json(path, {"entries": entries})
    write_atomically(run_dir.root / "eval.md", text)
    return text
