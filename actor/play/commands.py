"""The commands that play: `eval`, and what `sft` and `evolve` want played."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from actor.play.demonstrate import demonstrate
from actor.play.evaluate import fetch_task_lists, run
from actor.play.own_process import play_into_journal
from common.config.evaluation import EvalItems
from common.config.run_config import RunConfig
from common.launch.hub import serve_hub
from common.launch.lock import hold_run
from common.store.run_dir import RunDir
from common.wire.planned import PlannedEpisode

# (config, hub's address, its token, test items of the tasks by environment) -> what is played
ChooseItems = Callable[[RunConfig, str, str, dict[str, list[str]]], Sequence[PlannedEpisode]]


def evaluate(cfg: RunConfig, run_dir: RunDir, *, root: Path, choose_items: ChooseItems) -> int:
    """Play held-out items with one policy, write and print the tables; return the exit code."""
    # The hub's own files are apart, so that a run which is being trained can be evaluated.
    hub_cfg = replace(cfg, run=replace(cfg.run, dir=f"{cfg.run.dir}/{cfg.run.name}", name="eval"))
    hub_dir = RunDir(root=run_dir.root / "eval")
    with (
        hold_run(hub_dir.root, name="eval"),
        serve_hub(hub_cfg, hub_dir, root=root) as (url, token),
    ):
        by_task = cfg.eval.items is EvalItems.TASKS
        lists = fetch_task_lists(cfg, hub_url=url, token=token) if by_task else {}
        episodes = choose_items(cfg, url, token, lists)
        return run(cfg, run_dir, episodes, hub_url=url, token=token, say=print)


def collect_demonstrations(cfg: RunConfig, url: str, token: str, path: Path) -> None:
    """Write episodes of the environments' own experts to `path`."""
    asyncio.run(demonstrate(cfg, hub_url=url, token=token, path=path))


def play_given(
    cfg: RunConfig, episodes: Sequence[PlannedEpisode], url: str, token: str, folder: Path
) -> None:
    """Play the given episodes with the policy at `model.path`, into the journal at `folder`."""
    play_into_journal(cfg, episodes, hub_url=url, token=token, folder=folder)
