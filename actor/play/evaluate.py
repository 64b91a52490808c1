"""The command `eval`: play held-out items with one policy, write eval.md and eval.json."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from actor.play.endpoint import NO_LIMIT, Endpoint, read_key, text_policy
from actor.play.play import Patience, Player, journal_at, play_all, play_into_journal
from actor.rollout.env_client import HubClient
from common.checks.preflight import check_model
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError, LongstrideError
from common.report.eval_scores import ItemPlays, all_scores
from common.report.eval_table import as_markdown
from common.store.journal import read_journal
from common.store.run_dir import RunDir, write_atomically, write_json
from common.wire.heldout import HeldOutItem
from common.wire.messages import Trajectory
from common.wire.planned import PlannedEpisode

logger = logging.getLogger(__name__)

DIGEST_CHARS = 10


def check_policy(cfg: RunConfig, root: Path) -> None:
    """Return if there is something to play and the policy can be asked; nothing has started yet.

    Raises:
        ConfigError: no task or item, no such checkpoint or key, or a tokenizer that the model does
            not fit.
    """
    if not cfg.tasks:
        raise ConfigError("tasks=[]: an evaluation needs at least one, as [{env: e, subset: s}]")
    if cfg.eval.num_items == 0:
        raise ConfigError("eval.num_items=0: leaves no held-out item; -1: all there are")
    if cfg.policy.url:
        read_key(cfg.policy)
        return
    check_model(cfg.model.path, root)
    _check_vocabulary(root / cfg.model.path, cfg.model.path)


def _check_vocabulary(folder: Path, shown: str) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    num_rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    path = folder / "tokenizer.json"
    if not num_rows or not path.is_file():
        return
    largest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values())
    if largest >= num_rows:
        raise ConfigError(
            f"model.path={shown}: the tokenizer has token id {largest}, the model only the"
            f" {num_rows} below {num_rows}; give the model its own tokenizer"
        )


def fetch_task_lists(cfg: RunConfig, *, hub_url: str, token: str) -> dict[str, list[str]]:
    """Return the test items of all catalogue tasks of the configured environments.

    Raises:
        ConfigError: the hub has no such lists.
    """

    async def fetch() -> dict[str, list[str]]:
        async with HubClient(hub_url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub:
            lists: dict[str, list[str]] = {}
            for env in dict.fromkeys(task.env for task in cfg.tasks):
                tasks = await hub.request("GET", f"/v1/envs/{env}/tasks", None)
                items = [item_id for task in tasks.values() for item_id in task["test"]]
                lists[env] = list(dict.fromkeys(items))
            return lists

    try:
        return asyncio.run(fetch())
    except EnvError as e:
        raise ConfigError(f"eval.items=tasks: {e}") from e


def run(
    cfg: RunConfig,
    run_dir: RunDir,
    items: Sequence[HeldOutItem],
    *,
    hub_url: str,
    token: str,
    say: Callable[[str], None],
) -> int:
    """Play what is not in the journal yet, write the tables, say them; return the exit code.

    The run directory's tables keep a row for every policy that was evaluated in it, so policies
    that are evaluated one after the other under one `run.name` stand side by side.

    Args:
        items: each with `eval.k` seeds.

    Returns:
        0, or 1 if more than `eval.max_failed_frac` of the episodes failed by infrastructure or
        playing them ended early.
    """
    folder = run_dir.root / "eval"
    policy = describe_policy(cfg)
    plans = make_plans(items, digest_of(policy))
    finished = read_finished(folder / "journal", plans)
    todo = [plan for plan in plans if plan.episode_id not in finished]
    logger.info("evaluating episodes=%d finished_before=%d", len(plans), len(plans) - len(todo))
    max_failed = int(cfg.eval.max_failed_frac * len(plans))
    patience = Patience(max_attempts=cfg.scheduler.max_attempts, max_failed=max_failed)
    problem = ""
    try:
        if todo:
            _play(cfg, todo, hub_url=hub_url, token=token, folder=folder, patience=patience)
    except ConfigError:
        raise
    except LongstrideError as e:
        problem = str(e)
    entry = make_entry(cfg, policy, items, read_plays(folder / "journal", items, plans))
    say(_write(run_dir, entry))
    num_failed = entry["overall"]["num_failed"]
    if not problem and num_failed > max_failed:
        problem = f"{num_failed} of {len(plans)} episodes failed by infrastructure"
    if problem:
        logger.error("evaluation is not complete reason=%s", problem)
    return 1 if problem else 0


def describe_policy(cfg: RunConfig) -> dict[str, Any]:
    """Return who plays and how: whatever makes an episode another one if it changes."""
    how = {"style": cfg.envhub.style}
    if cfg.policy.url:
        return how | {
            "source": cfg.policy.url,
            "model": cfg.policy.model,
            "temperature": cfg.policy.temperature,
            "max_turn_tokens": cfg.policy.max_turn_tokens,
        }
    files = sorted(
        [*Path(cfg.model.path).glob("*.safetensors"), *Path(cfg.model.path).glob("*.json")]
    )
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return how | {
        "source": "engine",
        "model": cfg.model.path,
        "files": hashlib.blake2b(json.dumps(stats).encode(), digest_size=8).hexdigest(),
        "dtype": cfg.model.dtype,
        "temperature": cfg.actor.temperature,
        "max_turn_tokens": cfg.actor.max_turn_tokens,
        "max_model_len": cfg.actor.max_model_len,
    }


def digest_of(policy: dict[str, Any]) -> str:
    """Return a short name of a policy that differs if anything of it does."""
    text = json.dumps(policy, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()[:DIGEST_CHARS]


def make_plans(items: Sequence[HeldOutItem], digest: str) -> list[PlannedEpisode]:
    """Return the episodes to play; first one sample of every item, then the second of every."""
    num_samples = max(len(item.seeds) for item in items)
    return [
        PlannedEpisode(
            episode_id=f"eval-{digest}/{item.env}/{item.item_id}/{item.horizon}.{sample}",
            env=item.env,
            item_id=item.item_id,
            seed=item.seeds[sample],
            horizon=item.horizon,
        )
        for sample in range(num_samples)
        for item in items
        if sample < len(item.seeds)
    ]


def read_finished(journal: Path, plans: Sequence[PlannedEpisode]) -> set[str]:
    """Return the planned episodes that the journal has and that no infrastructure failed."""
    return {
        episode_id
        for episode_id, trajectory in _read(journal, plans).items()
        if not trajectory.end_reason.is_infrastructure_failure
    }


def read_plays(
    journal: Path, items: Sequence[HeldOutItem], plans: Sequence[PlannedEpisode]
) -> list[ItemPlays]:
    """Return what became of every item, in the order of `items`."""
    played = _read(journal, plans)
    by_item = {
        (item.env, item.item_id): ItemPlays(env=item.env, subset=item.subset, item_id=item.item_id)
        for item in items
    }
    for plan in plans:
        entry = by_item[plan.env, plan.item_id]
        if (trajectory := played.get(plan.episode_id)) is None:
            entry.num_missing += 1
        else:
            entry.add(trajectory)
    return list(by_item.values())


def _read(journal: Path, plans: Sequence[PlannedEpisode]) -> dict[str, Trajectory]:
    """Return the last play of every planned episode; a later failure replaces no good play."""
    wanted = {plan.episode_id for plan in plans}
    found: dict[str, Trajectory] = {}
    for _, trajectory in read_journal(journal):
        known = found.get(trajectory.episode_id)
        is_known = known is not None and not known.end_reason.is_infrastructure_failure
        if trajectory.episode_id in wanted and not is_known:
            found[trajectory.episode_id] = trajectory
    return found


def _play(
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str,
    folder: Path,
    patience: Patience,
) -> None:
    journal = folder / "journal"
    if cfg.policy.url:
        asyncio.run(
            _play_at_endpoint(
                cfg, plans, hub_url=hub_url, token=token, journal=journal, patience=patience
            )
        )
    else:
        play_into_journal(
            cfg, plans, hub_url=hub_url, token=token, folder=journal, patience=patience
        )


async def _play_at_endpoint(
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str,
    journal: Path,
    patience: Patience,
) -> None:
    async with (
        Endpoint(cfg.policy) as endpoint,
        HubClient(hub_url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub,
    ):
        player = Player(
            policy=lambda _: text_policy(endpoint),
            max_concurrent=cfg.policy.max_concurrent,
            max_tokens=NO_LIMIT,
            turn_tokens=0,
        )
        with journal_at(journal) as record:
            await play_all(cfg, plans, hub=hub, player=player, record=record, patience=patience)
        logger.info(
            "endpoint prompt_tokens=%d sampled_tokens=%d retries=%d",
            endpoint.num_prompt_tokens,
            endpoint.num_sampled_tokens,
            endpoint.num_retries,
        )


def make_entry(
    cfg: RunConfig,
    policy: dict[str, Any],
    items: Sequence[HeldOutItem],
    plays: Sequence[ItemPlays],
) -> dict[str, Any]:
    """Return the row of one policy, as eval.json holds it."""
    return {
        "digest": digest_of(policy),
        "label": cfg.eval.label or cfg.policy.model or Path(cfg.model.path).name,
        "policy": policy,
        "k": cfg.eval.k,
        "items": cfg.eval.items.value,
        "num_items": len(items),
        **all_scores(plays, k=cfg.eval.k),
    }


def _write(run_dir: RunDir, entry: dict[str, Any]) -> str:
    """Put the row into eval.json, in the place of an older one of the same policy; return eval.md.

    Raises:
        ConfigError: eval.json is not what this command wrote.
    """
    path = run_dir.root / "eval.json"
    entries: list[dict[str, Any]] = []
    if path.exists():
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"{path}: not an evaluation's ({e!r}); move it away") from e
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
