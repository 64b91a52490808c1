"""The offline training commands `sft`, `dpo`, `evolve` and `merge`, and the items of `eval`."""

import itertools
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from common.config.curriculum import subsets_in_use
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.errors import ConfigError
from common.host.lock import hold_run
from common.ids import subset_of
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, save_config
from learner.journal.metrics import MetricsWriter
from learner.policy.lora import ADAPTER_TENSORS, check_resumable, load_adapter
from learner.training.checkpoint import newest_checkpoint
from learner.training.shards import check_whole
from learner.wandb_sink import WandbSink
from scheduler.curriculum.catalogue import HubCatalogue, fetch_catalogue, validate_tasks
from scheduler.curriculum.sampling import Item, eval_items, hash_words, spread
from tools.evaluate.config import EvalItems, EvalOptions
from tools.evaluate.own_process import play_given
from tools.evaluate.play import PlannedEpisode
from tools.launch.hub import command_part, serve_hub
from tools.offline import dpo, evolve, sft
from tools.offline.config import DpoConfig, EvolveConfig, SftConfig
from tools.offline.demonstrate import demonstrate
from tools.offline.scratch import save_policy
from tools.offline.training import Log, load_start

logger = logging.getLogger(__name__)

# Environment -> test items of all its tasks, in the catalogue's order.
TaskLists = Mapping[str, list[str]]
NO_TURNS: Mapping[str, int] = {}


def plan_heldout(
    cfg: EvalOptions,
    tasks: list[TaskSection],
    catalogue: HubCatalogue,
    lists: TaskLists,
    turns: Mapping[str, int] = NO_TURNS,
) -> list[PlannedEpisode]:
    """Return the first sample of every item, then the second, up to `eval.k`.

    A seed depends only on its item and the number of its sample.

    Args:
        lists: test items of the tasks; not used with eval.items=spread.
        turns: environment -> most turns, if they differ from those of the subset.

    Raises: ConfigError: there is no item to play, or a subset belongs to no task.
    """
    if cfg.items is EvalItems.SPREAD:
        items = eval_items(tasks, catalogue, cfg.num_items, split=cfg.split)
    else:
        items = _task_items(cfg, tasks, lists)
    if not items:
        raise ConfigError(
            f"eval.num_items={cfg.num_items}: no held-out item of the configured tasks is selected"
        )
    horizons = {
        (item.env, item.subset): turns.get(item.env)
        or catalogue.entry(item.env, item.subset).max_turns
        for item in items
    }
    return [
        _plan(item, sample, horizons[item.env, item.subset])
        for sample in range(cfg.k)
        for item in items
    ]


def _plan(item: Item, sample: int, horizon: int) -> PlannedEpisode:
    """Return one sample of an item as a planned episode."""
    return PlannedEpisode(
        episode_id=f"{item.env}/{item.item_id}/{horizon}.{sample}",
        env=item.env,
        item_id=item.item_id,
        seed=hash_words("eval", item.env, item.item_id, sample) >> 33,
        horizon=horizon,
    )


def _task_items(cfg: EvalOptions, tasks: list[TaskSection], lists: TaskLists) -> list[Item]:
    """Return the test items of the configured subsets, cut to the same share of each subset."""
    active = [task for task in tasks if task.weight > 0]
    item_lists: list[list[str]] = []
    for task in active:
        listed = lists.get(task.env, [])
        mine = [item_id for item_id in listed if subset_of(item_id) == task.items()]
        if not mine:
            subsets = sorted({subset_of(item_id) for item_id in listed})
            raise ConfigError(
                f"eval.items={cfg.items}: the list of the"
                f" {'paper' if cfg.items is EvalItems.PAPER else 'catalogue'} has no items of"
                f" {task.items()!r} of {task.env}. It has items of {subsets}."
            )
        item_lists.append(mine)
    sizes = [len(mine) for mine in item_lists]
    num_items = sum(sizes) if cfg.num_items < 0 else cfg.num_items
    quotas = spread(num_items, weights=[float(size) for size in sizes], caps=sizes)
    if sum(quotas) < sum(sizes):
        num_left = sum(sizes) - sum(quotas)
        text = "eval.num_items=%d skips %d of the %d held-out items of the tasks"
        logger.warning(text, cfg.num_items, num_left, sum(sizes))
    return [
        Item(env=task.env, subset=task.items(), item_id=item_id)
        for task, mine, quota in zip(active, item_lists, quotas, strict=True)
        for item_id in mine[:quota]
    ]


@contextmanager
def _logged(cfg: RunConfig, run_dir: RunDir, job: str) -> Generator[Log]:
    """Yield a function that logs the metrics of an optimizer step.

    They appear in metrics.jsonl of the command's folder, and in a wandb run of the job. The folder
    is held, and marked as finished at the end.
    """
    with hold_run(run_dir.root, name=f"{run_dir.root.parent.name}/{job}"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        save_config(cfg, run_dir.config)
        run_dir.finished.unlink(missing_ok=True)
        metrics = MetricsWriter(run_dir, [WandbSink(run_dir, cfg, job=job)])
        numbers = itertools.count(1)
        try:
            yield lambda values: metrics.log(
                next(numbers), {f"{job}/{k}": v for k, v in values.items()}
            )
        finally:
            metrics.close()
        mark_finished(run_dir, version=next(numbers) - 1, result="")


def make_policy(cfg: SftConfig, run_dir: RunDir) -> int:
    """Train on demonstrations, collected first if none are given; return the exit code."""
    output = cfg.sft.output or str(run_dir.root / "policy")
    cfg = replace(cfg, sft=replace(cfg.sft, output=output))
    cfg, part = command_part(cfg, run_dir, "sft")
    path = Path(cfg.sft.demonstrations)
    if not cfg.sft.demonstrations:
        path = part.demonstrations
        with serve_hub(cfg, part) as (url, token):
            demonstrate(cfg, url, token, path)
    with _logged(cfg, part, "sft") as log:
        print(f"policy: {sft.run(cfg, path, log=log)}")
    return 0


def prefer(cfg: DpoConfig, run_dir: RunDir) -> int:
    """Train on pairs of episodes; return the exit code."""
    output = cfg.dpo.output or str(run_dir.root / "policy")
    cfg, part = command_part(replace(cfg, dpo=replace(cfg.dpo, output=output)), run_dir, "dpo")
    with _logged(cfg, part, "dpo") as log:
        print(f"policy: {dpo.run(cfg, log=log)}")
    return 0


def merge(cfg: RunConfig, run_dir: RunDir) -> int:
    """Write the newest adapters of a run, merged into their base; return the exit code.

    Raises: ConfigError: the run has no checkpoint of adapters, or the base model is missing.
    """
    checkpoint = newest_checkpoint(run_dir.checkpoints)
    if checkpoint is not None:
        check_whole(checkpoint, key="run.name", shown=cfg.run.name)
    if checkpoint is None or not (checkpoint / ADAPTER_TENSORS).exists():
        raise ConfigError(
            f"run.name={cfg.run.name}: {run_dir.checkpoints} has no checkpoint with adapters. Train"
            " the run with learner.lora.rank above 0 first."
        )
    model, tokenizer = load_start(cfg.model.path, replace(cfg.learner, device="cpu"))
    check_resumable(checkpoint, model, cfg.learner.lora)
    load_adapter(model, checkpoint)
    print(f"policy: {save_policy(run_dir.root / 'policy', model, tokenizer)}")
    return 0


def play_and_imitate(cfg: EvolveConfig, run_dir: RunDir) -> int:
    """Play episodes and train on the successful ones, in iterations; return the exit code."""
    output = cfg.evolve.output or str(run_dir.root / "policy")
    cfg, part = command_part(
        replace(cfg, evolve=replace(cfg.evolve, output=output)), run_dir, "evolve"
    )
    with serve_hub(cfg, part) as (url, token):
        catalogue = catalogue_of(cfg, url, token)

        def play_iteration(now: EvolveConfig, iteration: int, folder: Path) -> None:
            play_given(now, evolve.plan_episodes(now, catalogue, iteration), url, token, folder)

        with _logged(cfg, part, "evolve") as log:
            policy = evolve.run(cfg, run_dir.root, play=play_iteration, log=log)
    print(f"policy: {policy}")
    return 0


def catalogue_of(cfg: RunConfig, url: str, token: str) -> HubCatalogue:
    """Return the hub's catalogue.

    Raises: ConfigError: it lacks a task or has no item at a distance.
    """
    subsets = subsets_in_use(cfg.curriculum, cfg.tasks)
    timeout_s = cfg.actor.env_timeout_s
    catalogue = fetch_catalogue(url, token=token, timeout_s=timeout_s, subsets=subsets)
    validate_tasks(cfg.tasks, catalogue, cfg.curriculum)
    return catalogue
