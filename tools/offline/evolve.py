"""AgentEvol: repeatedly play training items, keep the successful episodes and train on them.

Each iteration plays with the newest policy. With `evolve.from_base` the base model is trained on
all episodes kept so far. Otherwise the newest policy is trained on the new episodes only.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from common.config.learner import FULL
from common.config.load import sections_as_yaml
from common.errors import ConfigError, LongstrideError
from common.store.run_dir import RunDir, json_object, write_json
from common.text import counted
from common.wire.messages import Trajectory
from learner.journal.journal import read_journal
from scheduler.curriculum.catalogue import HubCatalogue
from scheduler.curriculum.sampling import hash_words, permute, spread
from tools.evaluate.evaluate import (
    LIMITS_OF_ENVS,
    OPERATIONAL,
    catalogue_of,
    digest_of_envs,
    digest_of_model,
    leaves,
    read_finished,
    results_of,
)
from tools.evaluate.own_process import make_job, play_in_own_process
from tools.evaluate.play import PlannedEpisode, PlayJob
from tools.launch.hub import command_part, serve_hub
from tools.offline import sft
from tools.offline.config import EvolveConfig
from tools.offline.rows import Row, first_plays, num_episodes, read_rows
from tools.offline.scratch import save_policy
from tools.offline.training import Log, ignore, load_start, logged_steps

logger = logging.getLogger(__name__)

SETTINGS = "evolve_settings.json"  # Settings of all iterations of a run.
TRAINED = "trained.json"  # Marks an iteration whose policy is complete.

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

    An iteration that is complete on disk is not repeated, so an interrupted run can be resumed. A
    second play of an episode is not trained.

    Args:
        run_root: folder of the iterations, each in `iteration-<i>/`.
        play: plays the items of an iteration that the journal lacks into it.

    Raises:
        ConfigError: no episode so far is good enough to be kept, or the folder has iterations with
            other settings.
        LongstrideError: more than `scheduler.max_failed_frac` of an iteration's episodes failed.
    """
    _check_settings(cfg, run_root)
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
            _check_failures(journal, max_failed_frac=cfg.scheduler.max_failed_frac)
            write_json(folder / "played.json", _summary_of(journal))
        summary = _summary_of(journal)
        max_tokens = cfg.actor.max_model_len
        rows = first_plays(
            read_rows(journal, tokenizer=tokenizer, max_tokens=max_tokens, key="evolve journal")
        )
        new = [row for row in rows if row.is_worth(cfg.evolve.min_reward)]
        selected = [*selected, *new] if cfg.evolve.from_base else new
        num_kept = num_episodes(selected)
        logger.info(
            "selected episodes iteration=%d kept=%d new=%d of=%d solved=%d failed=%d",
            iteration,
            num_kept,
            num_episodes(new),
            summary["episodes"],
            summary["successes"],
            summary["failed"],
        )
        if not selected:
            raise ConfigError(
                f"evolve.min_reward={cfg.evolve.min_reward:g}: no episode of iteration {iteration}"
                " has this reward. Lower evolve.min_reward, or start from a better policy."
            )
        if not (folder / TRAINED).exists():
            start = cfg.model.path if cfg.evolve.from_base else newest
            model, _ = load_start(start, cfg.learner, max_tokens=cfg.actor.max_model_len)
            log(
                {
                    "iteration": iteration + 1.0,
                    "kept": num_kept,
                    "solved_frac": summary["successes"] / max(summary["episodes"], 1),
                    "failed": summary["failed"],
                }
            )
            seed = cfg.run.seed + iteration
            sft.train(model, selected, section, cfg.learner, seed=seed, log=log)
            save_policy(policy, model, tokenizer)
            write_json(folder / TRAINED, {"kept": num_kept})
        newest = str(policy)
    whole = replace(cfg.learner, lora=FULL)  # Adapters are already merged.
    return save_policy(Path(cfg.evolve.output), *load_start(newest, whole))


def _summary_of(journal: Path) -> dict[str, int]:
    """Return the numbers of complete, successful and failed episodes of an iteration."""
    played = _played(journal)
    complete = [each for each in played if not each.end_reason.is_infrastructure_failure]
    return {
        "episodes": len(complete),
        "successes": sum(each.is_success for each in complete),
        "failed": len(played) - len(complete),
    }


def _check_failures(journal: Path, *, max_failed_frac: float) -> None:
    """Raise LongstrideError if a larger share of the episodes had infrastructure failures."""
    played = _played(journal)
    failures = [each for each in played if each.end_reason.is_infrastructure_failure]
    if len(failures) > max_failed_frac * len(played):
        last = failures[-1]
        raise LongstrideError(
            f"scheduler.max_failed_frac={max_failed_frac:g}: {len(failures)} of"
            f" {counted(len(played), 'episode')} had infrastructure failures. The last one was"
            f" {last.end_reason}: {last.error}. The same command plays them again."
        )


def _played(journal: Path) -> list[Trajectory]:
    """Return the result of each episode in a journal."""
    return [*results_of(trajectory for _, trajectory in read_journal(journal)).values()]


def _check_settings(cfg: EvolveConfig, run_root: Path) -> None:
    """Write the settings of the policies, or compare them with those of earlier iterations.

    Raises: ConfigError: they differ; names the keys.
    """
    path = run_root / SETTINGS
    settings = _settings_of(cfg)
    if not any(run_root.glob("iteration-*")):
        run_root.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
        return
    if not path.exists():
        logger.warning("%s is missing: earlier iterations may have other settings", path)
        return
    before = json_object(path)
    usual = _settings_of(EvolveConfig())
    pairs = [
        (key, before.get(key, usual.get(key)), settings.get(key, usual.get(key)))
        for key in sorted({*before, *settings})
    ]
    differences = [f"{key}: was {was}, now {now}" for key, was, now in pairs if was != now]
    if differences:
        raise ConfigError(
            f"run.name={run_root.name}: its iterations have other settings"
            f" ({'; '.join(differences)}). Use another run.name, or move {run_root}/iteration-*"
            " away"
        )


def _settings_of(cfg: EvolveConfig) -> dict[str, Any]:
    """Return the settings that change the policies of a run, by key, and digests of files."""
    others = {
        "actor": sorted(OPERATIONAL),
        "learner": ["host", "port", "advertise", "num_threads", "profile_steps", "memory_snapshot"],
        "sft": ["data", "output"],
        "evolve": ["output", "num_iterations"],
        "envhub": [field.name for field in fields(cfg.envhub) if field.name != "style"],
        "run": [field.name for field in fields(cfg.run) if field.name != "seed"],
    }
    sections = [*others, "model", "tasks", "envs"]
    tree = yaml.safe_load(sections_as_yaml(cfg, sections, without=others))
    settings = {
        key: value
        for key, value in leaves(tree)
        if not key.startswith("envs.") or key.rpartition(".")[2] not in LIMITS_OF_ENVS
    }
    settings["files of envs"] = digest_of_envs(cfg.envs, cfg.envhub.envs)
    settings["files of model.path"] = digest_of_model(Path(cfg.model.path))
    return settings


def job_of(
    cfg: EvolveConfig, plans: Sequence[PlannedEpisode], *, url: str, token: str, journal: Path
) -> PlayJob:
    """Return the job of playing the plans without a complete episode in the journal."""
    finished = read_finished(journal, plans)
    left = [plan for plan in plans if plan.episode_id not in finished]
    return replace(
        make_job(cfg, left, url, token, journal),
        max_attempts=cfg.scheduler.max_attempts,
        max_failed=int(cfg.scheduler.max_failed_frac * len(plans)),
    )


def play_and_imitate(cfg: EvolveConfig, run_dir: RunDir) -> int:
    """Play episodes and train on the successful ones, in iterations; return the exit code."""
    output = cfg.evolve.output or str(run_dir.root / "policy")
    cfg, part = command_part(
        replace(cfg, evolve=replace(cfg.evolve, output=output)), run_dir, "evolve"
    )
    with serve_hub(cfg, part) as (url, token):
        catalogue = catalogue_of(cfg, url, token)

        def play_iteration(now: EvolveConfig, iteration: int, folder: Path) -> None:
            plans = plan_episodes(now, catalogue, iteration)
            job = job_of(now, plans, url=url, token=token, journal=folder)
            if job.plans:
                play_in_own_process(job, now)

        with logged_steps(cfg, part, "evolve") as log:
            policy = run(cfg, run_dir.root, play=play_iteration, log=log)
    print(f"policy: {policy}")
    return 0
