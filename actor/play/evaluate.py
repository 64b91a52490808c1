"""The command `eval`: play held-out items with one policy, write eval.md and eval.json."""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from actor.play.endpoint import NO_LIMIT, Endpoint, read_key, text_policy
from actor.play.eval_entry import (
    describe_policy,
    digest_of,
    make_entry,
    read_finished,
    read_plays,
    write_entry,
)
from actor.play.own_process import play_into_journal
from actor.play.play import Patience, Player, journal_at, play_all
from actor.rollout.env_client import Environments, HubClient
from common.checks.preflight import check_model
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError, LongstrideError
from common.store.run_dir import RunDir
from common.wire.planned import PlannedEpisode

logger = logging.getLogger(__name__)


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
    except EnvError as error:
        raise ConfigError(f"eval.items=tasks: {error}") from error


def run(
    cfg: RunConfig,
    run_dir: RunDir,
    episodes: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str,
    say: Callable[[str], None],
) -> int:
    """Play what is not in the journal yet, write the tables, say them; return the exit code.

    The run directory's tables keep a row for every policy that was evaluated in it, so policies
    that are evaluated one after the other under one `run.name` stand side by side.

    Args:
        episodes: `eval.k` samples of every item.

    Returns:
        0, or 1 if more than `eval.max_failed_frac` of the episodes failed by infrastructure or
        playing them ended early.
    """
    folder = run_dir.root / "eval"
    policy = describe_policy(cfg)
    prefix = f"eval-{digest_of(policy)}"  # another policy's play is another episode
    plans = [replace(each, episode_id=f"{prefix}/{each.episode_id}") for each in episodes]
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
    except LongstrideError as error:
        problem = str(error)
    entry = make_entry(cfg, policy, read_plays(folder / "journal", plans))
    say(write_entry(run_dir, entry))
    num_failed = entry["overall"]["num_failed"]
    if not problem and num_failed > max_failed:
        problem = f"{num_failed} of {len(plans)} episodes failed by infrastructure"
    if problem:
        logger.error("evaluation is not complete reason=%s", problem)
    return 1 if problem else 0


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
            episode_timeout_s=cfg.actor.episode_timeout_s,
        )
        with journal_at(journal) as record:
            await play_all(
                plans,
                environments=await Environments.of(hub, style=cfg.envhub.style),
                player=player,
                record=record,
                patience=patience,
            )
        logger.info(
            "endpoint prompt_tokens=%d sampled_tokens=%d retries=%d",
            endpoint.num_prompt_tokens,
            endpoint.num_sampled_tokens,
            endpoint.num_retries,
        )
