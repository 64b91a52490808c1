"""AgentEvol: repeatedly play training items, keep the successful episodes and train on them.

Each iteration plays with the newest policy. With `evolve.from_base` the base model is trained on
all episodes kept so far. Otherwise the newest policy is trained on the new episodes only.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from common.config.learner import FULL
from common.errors import ConfigError
from common.store.run_dir import RunDir
from learner.journal.journal import read_journal
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import hash_words, permute, spread
from tools.evaluate.evaluate import catalogue_of
from tools.evaluate.own_process import play_given
from tools.evaluate.play import PlannedEpisode
from tools.launch.hub import command_part, serve_hub
from tools.offline import sft
from tools.offline.config import EvolveConfig
from tools.offline.rows import Row, num_episodes, read_rows
from tools.offline.scratch import save_policy
from tools.offline.training import Log, ignore, load_start, logged_steps

logger = logging.getLogger(__name__)

# Arguments: config whose model.path plays, iteration, folder of the journal.
Play = Callable[[EvolveConfig, int, Path], None]


def plan_episodes(
    cfg: EvolveConfig, catalogue: HubCatalogue, iteration: int
) -> list[PlannedEpisode]:
    """Return the episodes of an iteration, distributed by the tasks' weights.

    Within a task every training item is used once before any item is used again.
    """
    active = [task for task in cfg.tasks if task.weight > 0]
    sizes = [catalogue.entry(task.env, task.items()).num_train for task in active]
    quotas = spread(
        cfg.evolve.items_per_iteration, weights=[task.weight for task in active], caps=sizes
    )
    plans: list[PlannedEpisode] = []
    for task, size, quota in zip(active, sizes, quotas, strict=True):
        key = hash_words("evolve", cfg.run.seed, task.env, task.items())
        for number in range(iteration * quota, (iteration + 1) * quota):
            item_id = f"{task.items()}-train-{permute(number % size, size, key=key)}"
            plans += [
                PlannedEpisode(
                    episode_id=f"evolve-{iteration}/{task.env}/{item_id}/{number // size}.{sample}",
                    env=task.env,
                    item_id=item_id,
                    seed=hash_words("evolve", cfg.run.seed, item_id, number, sample) >> 33,
                    horizon=catalogue.entry(task.env, task.items()).max_turns,
                )
                for sample in range(cfg.evolve.samples_per_item)
            ]
    return plans


def run(cfg: EvolveConfig, run_root: Path, *, play: Play, log: Log = ignore) -> Path:
    """Run all iterations and return the folder of the last policy.

    An iteration that is complete on disk is not repeated, so an interrupted run can be resumed.

    Args:
        run_root: folder of the iterations, each in `iteration-<i>/`.
        play: plays the items of an iteration into a journal.

    Raises:
        ConfigError: no episode so far is good enough to be kept.
    """
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    section = replace(cfg.sft, from_scratch=False)  # The rates are those of a checkpoint.
    selected: list[Row] = []
    newest = cfg.model.path
    for iteration in range(cfg.evolve.num_iterations):
        folder = run_root / f"iteration-{iteration}"
        journal = folder / "journal"
        policy = folder / "policy"
        if not (folder / "played.json").exists():
            play(replace(cfg, model=replace(cfg.model, path=newest)), iteration, journal)
            _write_summary(journal, folder / "played.json")
        max_tokens = cfg.actor.max_model_len
        rows = read_rows(journal, tokenizer=tokenizer, max_tokens=max_tokens, key="evolve journal")
        new = [row for row in rows if row.is_worth(cfg.evolve.min_reward)]
        selected = [*selected, *new] if cfg.evolve.from_base else new
        nums = {"kept": num_episodes(selected), "new": num_episodes(new), "all": num_episodes(rows)}
        logger.info(
            "selected episodes iteration=%d kept=%d new=%d", iteration, nums["kept"], nums["new"]
        )
        if not selected:
            raise ConfigError(
                f"evolve.min_reward={cfg.evolve.min_reward:g}: no episode of iteration {iteration}"
                " has this reward. Lower evolve.min_reward, or start from a better policy."
            )
        if not (policy / "config.json").exists():
            start = cfg.model.path if cfg.evolve.from_base else newest
            model, _ = load_start(start, cfg.learner, max_tokens=cfg.actor.max_model_len)
            log(
                {
                    "iteration": iteration + 1.0,
                    "kept": nums["kept"],
                    "solved_frac": nums["new"] / nums["all"],
                }
            )
            seed = cfg.run.seed + iteration
            sft.train(model, selected, section, cfg.learner, seed=seed, log=log)
            save_policy(policy, model, tokenizer)
        newest = str(policy)
    whole = replace(cfg.learner, lora=FULL)  # Adapters are already merged.
    return save_policy(Path(cfg.evolve.output), *load_start(newest, whole))


def _write_summary(journal: Path, path: Path) -> None:
    """Mark an iteration as played, and write its number of episodes and successes."""
    solved = [t.is_success for _, t in read_journal(journal)]
    summary = {"episodes": len(solved), "successes": sum(solved)}
    path.write_text(json.dumps(summary) + "\n", encoding="utf-8")
    logger.info("played episodes=%d success=%.3f", len(solved), sum(solved) / max(len(solved), 1))


def play_and_imitate(cfg: EvolveConfig, run_dir: RunDir) -> int:
    """Play episodes and train on the successful ones, in iterations; return the exit code."""
    output = cfg.evolve.output or str(run_dir.root / "policy")
    cfg, part = command_part(
        replace(cfg, evolve=replace(cfg.evolve, output=output)), run_dir, "evolve"
    )
    with serve_hub(cfg, part) as (url, token):
        catalogue = catalogue_of(cfg, url, token)

        def play_iteration(now: EvolveConfig, iteration: int, folder: Path) -> None:
            play_given(now, plan_episodes(now, catalogue, iteration), url, token, folder)

        with logged_steps(cfg, part, "evolve") as log:
            policy = run(cfg, run_dir.root, play=play_iteration, log=log)
    print(f"policy: {policy}")
    return 0
