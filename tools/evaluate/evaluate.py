"""The command `eval`: plays held-out items with one policy, writes eval.md and eval.json."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actor.rollout.env_client import HubClient
from actor.rollout.episode import Act, Render
from actor.seats.endpoint import NO_LIMIT, Endpoint, TextEpisode
from actor.seats.seats import Seats
from common.config.actor import ActorSection
from common.config.eval import EvalItems
from common.config.policy import PolicySection
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError, LongstrideError
from common.host.lock import hold_run
from common.ids import subset_of
from common.store.run_dir import RunDir
from common.text import counted
from tools.evaluate.eval_entry import (
    describe_policy,
    digest_of,
    make_entry,
    read_finished,
    read_plays,
    write_entry,
)
from tools.evaluate.opponents import serve_opponents
from tools.evaluate.own_process import make_job, play_in_own_process
from tools.evaluate.planned import PlannedEpisode
from tools.evaluate.play import EpisodePlayer, PlayJob, play
from tools.launch.hub import command_part, serve_hub

logger = logging.getLogger(__name__)

NO_NOTES: Mapping[str, str] = {}

# (config, hub's address, hub's token, env -> listed items, env -> turns) -> planned episodes
ChooseItems = Callable[
    [RunConfig, str, str, dict[str, list[str]], dict[str, int]], Sequence[PlannedEpisode]
]


@dataclass(slots=True, kw_only=True)
class ItemListing:
    """The hub's data on each environment: listed test items, their turn limit, and a note."""

    items: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    turns: dict[str, int] = field(default_factory=dict[str, int])
    notes: dict[str, str] = field(default_factory=dict[str, str])


def evaluate(cfg: RunConfig, run_dir: RunDir, *, root: Path, choose_items: ChooseItems) -> int:
    """Play held-out items with one policy, write and print the tables; return the exit code."""
    hub_cfg, hub_dir = command_part(cfg, run_dir, "eval")
    with (
        hold_run(hub_dir.root, name="eval"),
        serve_hub(hub_cfg, hub_dir, root=root) as (url, token),
        serve_opponents(hub_cfg, hub_dir, root=root),
    ):
        listed = fetch_listed(cfg, hub_url=url, token=token)
        episodes = choose_items(cfg, url, token, listed.items, listed.turns)
        notes = listed.notes
        echo = print
        for line in described(episodes, notes):
            echo(line)
        return run(cfg, run_dir, episodes, hub_url=url, token=token, echo=echo, notes=notes)


def fetch_listed(cfg: RunConfig, *, hub_url: str, token: str) -> ItemListing:
    """Return the hub's items for `eval.items`, and its notes on the environments.

    Raises: ConfigError: the hub has no such lists.
    """
    listed = ItemListing()

    async def fetch() -> None:
        """Fetch the hub's catalogue, and the item lists of the tasks' environments."""
        async with HubClient(hub_url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub:
            catalogue = await hub.request("GET", "/v1/envs", None)
            for env in dict.fromkeys(task.env for task in cfg.tasks):
                if note := catalogue.get(env, {}).get("note"):
                    listed.notes[env] = note
                if cfg.eval.items is EvalItems.TASKS:
                    tasks = await hub.request("GET", f"/v1/envs/{env}/tasks", None)
                    items = [item_id for task in tasks.values() for item_id in task["test"]]
                    listed.items[env] = list(dict.fromkeys(items))
                elif cfg.eval.items is EvalItems.PAPER:
                    _add_paper_items(listed, env, (catalogue.get(env) or {}).get("paper"))

    try:
        asyncio.run(fetch())
    except EnvError as error:
        raise ConfigError(f"eval.items={cfg.eval.items}: {error}") from error
    return listed


def _add_paper_items(listed: ItemListing, env: str, paper: Any) -> None:
    """Add the test set that the paper's tables use for an environment.

    Raises: ConfigError: the environment has none.
    """
    if not paper:
        raise ConfigError(f"eval.items=paper: the paper has no results for {env}")
    listed.items[env] = [item_id for items in paper["items"].values() for item_id in items]
    listed.turns[env] = paper["turns"]
    if paper["note"]:
        listed.notes[env] = paper["note"]


def described(episodes: Sequence[PlannedEpisode], notes: Mapping[str, str]) -> list[str]:
    """Return one line for each environment: number of items, subsets, note."""
    items: dict[str, Counter[str]] = {}
    for env, item_id in dict.fromkeys((each.env, each.item_id) for each in episodes):
        items.setdefault(env, Counter())[subset_of(item_id)] += 1
    lines: list[str] = []
    for env, counts in items.items():
        parts = ", ".join(f"{subset} {num}" for subset, num in counts.items())
        note = f"; {notes[env]}" if env in notes else ""
        lines.append(f"eval: {env}: {counted(counts.total(), 'item')} ({parts}){note}")
    return lines


def run(
    cfg: RunConfig,
    run_dir: RunDir,
    episodes: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str,
    echo: Callable[[str], None],
    notes: Mapping[str, str] = NO_NOTES,
) -> int:
    """Play the episodes that the journal lacks, write and print the tables; return the exit code.

    The tables of the run directory keep one row for each evaluated policy. So policies that are
    evaluated under the same `run.name` can be compared.

    Returns:
        0, or 1 if the evaluation is incomplete: it ended early, or more than `eval.max_failed_frac`
            of the episodes had an infrastructure failure.
    """
    folder = run_dir.root / "eval"
    policy = describe_policy(cfg.policy, cfg.model, cfg.actor, style=cfg.envhub.style)
    prefix = f"eval-{digest_of(policy)}"  # Episode ids differ between policies.
    plans = [replace(each, episode_id=f"{prefix}/{each.episode_id}") for each in episodes]
    finished = read_finished(folder / "journal", plans)
    todo = [plan for plan in plans if plan.episode_id not in finished]
    logger.info("evaluating episodes=%d finished_before=%d", len(plans), len(plans) - len(todo))
    max_failed = int(cfg.eval.max_failed_frac * len(plans))
    job = replace(
        make_job(cfg, todo, hub_url, token, folder / "journal"),
        max_attempts=cfg.scheduler.max_attempts,
        max_failed=max_failed,
    )
    problem = ""
    try:
        if todo and cfg.policy.url:
            asyncio.run(_play_at_endpoint(job, cfg.policy, cfg.actor))
        elif todo:
            play_in_own_process(job, cfg)
    except ConfigError:
        raise
    except LongstrideError as error:
        problem = str(error)
    label = cfg.policy.model or cfg.model.label
    plays = read_plays(folder / "journal", plans)
    entry = {**make_entry(cfg.eval, label, policy, plays), "notes": dict(notes)}
    echo(write_entry(run_dir, entry))
    num_failed = entry["overall"]["num_failed"]
    if not problem and num_failed > max_failed:
        problem = f"{num_failed} of {counted(len(plans), 'episode')} had infrastructure failures"
    if problem:
        logger.error("evaluation is not complete reason=%s", problem)
    return 1 if problem else 0


async def _play_at_endpoint(job: PlayJob, cfg: PolicySection, actor: ActorSection) -> None:
    """Play the job with a policy behind an endpoint."""
    seats = Seats(actor)
    async with Endpoint(cfg) as endpoint:

        def policy(_: PlannedEpisode) -> tuple[Act, Render]:
            episode = TextEpisode(endpoint)
            return episode.act, episode

        player = EpisodePlayer(
            policy=policy,
            max_concurrent=cfg.max_concurrent,
            max_tokens=NO_LIMIT,
            turn_tokens=0,
            options=actor.of_text(),
            seats=seats,
        )
        try:
            await play(job, player)
        finally:
            await seats.close()
        logger.info(
            "endpoint usage prompt_tokens=%d sampled_tokens=%d retries=%d",
            endpoint.num_prompt_tokens,
            endpoint.num_sampled_tokens,
            endpoint.num_retries,
        )
