"""The command `eval`: plays held-out items with one policy, writes eval.md and eval.json."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from actor.policy import PolicySection
from actor.rollout.env_client import HubClient
from actor.rollout.episode import Render, StreamingAct
from actor.seats.endpoint import NO_LIMIT, Endpoint, TextEpisode
from actor.seats.seats import Seats
from common.config.actor import ENDPOINT, RANDOM, ActorSection
from common.config.curriculum import subsets_in_use
from common.config.envs import EnvsSection
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection
from common.errors import ConfigError, EnvError, LongstrideError
from common.formats.chat_template import names_date, read_template, template_at
from common.host.lock import hold_run
from common.host.machine import gpus
from common.ids import subset_of
from common.repository import ROOT
from common.store.run_dir import RunDir, write_atomically, write_json
from common.store.run_start import mark_finished
from common.text import counted
from common.wire.messages import Trajectory
from learner.journal.journal import read_journal
from scheduler.curriculum.catalogue import HubCatalogue, fetch_catalogue, validate_tasks
from scheduler.curriculum.sampling import Item, eval_items, hash_words, spread
from tools.checks.preflight import check_model
from tools.checks.served_engines import opponent_engines
from tools.evaluate.config import EvalConfig, EvalItems, EvalOptions
from tools.evaluate.own_process import make_job, play_in_own_process
from tools.evaluate.play import EpisodePlayer, PlannedEpisode, PlayJob, play
from tools.evaluate.scores import ItemPlays, all_scores, as_markdown
from tools.launch.hub import command_part, serve_hub, serve_roles
from tools.launch.served import make_engine_specs, shared_variables

logger = logging.getLogger(__name__)

# Environment -> test items of all its tasks, in the catalogue's order.
TaskLists = Mapping[str, list[str]]
NO_TURNS: Mapping[str, int] = {}
DIGEST_CHARS = 10
NO_NOTES: Mapping[str, str] = {}
MODEL_FILES = ("*.safetensors", "*.json", "*.model")
# Options of `actor` that change no completed episode.
OPERATIONAL = {
    "num_actors",
    "num_spares",
    "engines_per_process",
    "name",
    "max_concurrent",
    "adapt_concurrency",
    "min_concurrent",
    "continue_episodes",
    "kv_cache_gib",
    "kv_cache_blocks",
    "gpu_memory_frac",
    "kv_at_update",
    "prefixes_at_update",
    "tensor_parallel_size",
    "num_gpus",
    "placement",
    "sleep",
    "enforce_eager",
    "turn_timeout_s",
    "episode_timeout_s",
    "env_timeout_s",
    "start_timeout_s",
    "delivery_window",
    "harnesses",
    "num_agents",
    "agents",
}
OF_LOSS = {"learn_plans", "learn_reflections", "learn_summaries"}
# Options of `actor` that `describe_policy` adds by themselves.
DESCRIBED = {"temperature", "max_turn_tokens", "max_model_len", "seats"}
# Options of environments that limit resources, or name folders of a run.
LIMITS_OF_ENVS = ("max_sessions", "max_jvms", "max_builds", "max_images", "run_dir", "token_env")
# Options of environments that name the files of their items or a folder of these.
FOLDERS = {
    "textcraft.recipes_dir",
    "searchqa.questions_dir",
    "sqlgym.bird_dir",
    "dataset.train",
    "dataset.eval",
    "dataset.validation",
    "terminal.train",
    "terminal.eval",
}
# Fields of a row of eval.json that identify it. A row replaces one with the same values.
ROW_KEY = ("digest", "split", "items", "k", "tasks")


@contextlib.contextmanager
def serve_opponents(cfg: EvalConfig, run_dir: RunDir) -> Generator[None]:
    """Serve the opponents of an evaluation inside the context.

    This process and its children find the engines by environment variables.

    Raises: ConfigError, EnvError: an engine did not start.
    """
    if not cfg.actor.seats.folders(in_training=False):
        yield
        return
    devices = gpus()
    for path in cfg.actor.seats.folders(in_training=False):
        check_model(path, key="actor.seats.eval_opponents")
    used = range(cfg.actor.tensor_parallel_size) if not cfg.policy.url else ()
    engines = opponent_engines(cfg, used=used, num_gpus=len(devices), in_training=False)
    roles = make_engine_specs(cfg, run_dir, engines, devices=devices)
    shared = shared_variables(roles, run_dir)
    os.environ.update(shared)
    try:
        with serve_roles(roles, run_dir, timeout_s=cfg.actor.start_timeout_s):
            yield
    finally:
        for name in shared:
            del os.environ[name]


def describe_policy(
    policy: PolicySection, model: ModelSection, actor: ActorSection, *, style: str
) -> dict[str, Any]:
    """Return the policy and its settings that influence its episodes."""
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
    return {
        "style": style,
        "source": "engine",
        "model": model.source or model.quantised or model.path,
        "files": digest_of_model(Path(model.path)),
        "dtype": model.dtype,
        "temperature": actor.temperature,
        "max_turn_tokens": actor.max_turn_tokens,
        "max_model_len": actor.max_model_len,
        **({"date": model.date} if names_date(Path(model.path), template_at(model)) else {}),
        **_of_prompts(model),
        **_of_actor(actor),
        **_of_seats(actor),
    }


def digest_of_model(folder: Path) -> str:
    """Return a digest of the names, sizes and times of a model's files, and of its templates."""
    files = sorted(path for kind in MODEL_FILES for path in folder.glob(kind))
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    templates = [_digest(path.read_bytes()) for path in sorted(folder.glob("*.jinja"))]
    return _digest(json.dumps([stats, templates]))


def _of_actor(actor: ActorSection) -> dict[str, Any]:
    """Return the options of `actor` that may change an episode and differ from their defaults."""
    usual = ActorSection()
    others = OPERATIONAL | OF_LOSS | DESCRIBED
    names = [field.name for field in fields(actor) if field.name not in others]
    return {
        name: value for name in names if (value := getattr(actor, name)) != getattr(usual, name)
    }


def digest_of_envs(envs: EnvsSection, references: Sequence[str] = ()) -> str:
    """Return a digest of the environments' options and of the files that they name.

    A function's module is such a file. Of a folder, the names, sizes and times of its files count.

    Args:
        references: `envhub.envs`, whose descriptions of environments count.
    """
    usual = dict(leaves(asdict(EnvsSection())))
    parts: list[list[Any]] = []
    for name, value in leaves(asdict(envs)):
        is_usual = name in usual and value == usual[name]
        texts = [*_texts(value), name.split(".", 2)[-1]]  # Rewards with weights are keys.
        has_folders = name in FOLDERS and not is_usual
        content = "".join(_content_at(text, has_folders=has_folders) for text in texts)
        if name.rpartition(".")[2] not in LIMITS_OF_ENVS and (content or not is_usual):
            parts.append([name, value, content])
    described = [[text, "", content] for text in references if (content := _content_at(text))]
    return _digest(json.dumps(sorted([*parts, *described], key=str)))


def _texts(value: object) -> list[str]:
    """Return the texts in an option."""
    values = cast(list[object], value) if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _content_at(text: str, *, has_folders: bool = False) -> str:
    """Return a digest of the file that an option names, alone, as FILE:NAME or KIND:FILE; or "".

    Args:
        has_folders: the option may name a folder.
    """
    paths = (
        ROOT / each for each in (text, text.rpartition(":")[0], text.partition(":")[2]) if each
    )
    for path in paths:
        if os.path.isfile(path):
            return _digest(path.read_bytes())
        if has_folders and path.is_dir():
            files = sorted(each for each in path.rglob("*") if each.is_file())
            return _digest(json.dumps([_stat_of(each, path) for each in files]))
    return ""


def _stat_of(path: Path, folder: Path) -> list[Any]:
    """Return the name, the size and the time of a file below a folder."""
    stat = path.stat()
    return [str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Generator[tuple[str, Any]]:
    """Yield the dotted name and the value of each option of a section."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _digest(content: str | bytes) -> str:
    """Return a short digest of a text or of the bytes of a file."""
    whole = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


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
    if folders := seats.folders(in_training=False):
        settings["opponent_files"] = [digest_of_model(ROOT / folder) for folder in folders]
        settings["opponent_options"] = seats.serve
    return settings


def _of_prompts(model: ModelSection) -> dict[str, Any]:
    """Return the non-default settings of prompts."""
    template = template_at(model)
    settings = {
        "chat_template": model.chat_template,
        "chat_template_text": _digest(read_template(template)) if template else "",
        "chat_template_kwargs": model.chat_template_kwargs,
    }
    return {name: value for name, value in settings.items() if value}


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
    """Return the result of each planned episode that the journal has."""
    wanted = {plan.episode_id for plan in plans}
    return results_of(each for _, each in read_journal(journal) if each.episode_id in wanted)


def results_of(trajectories: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Return the result of each episode by its id: the first complete one, else the last failure.

    Args:
        trajectories: the episodes of a journal, oldest first.
    """
    results: dict[str, Trajectory] = {}
    for trajectory in trajectories:
        earlier = results.get(trajectory.episode_id)
        if earlier is None or earlier.end_reason.is_infrastructure_failure:
            results[trajectory.episode_id] = trajectory
    return results


def make_entry(
    cfg: EvalOptions, label: str, policy: dict[str, Any], plays: Sequence[ItemPlays]
) -> dict[str, Any]:
    """Return the row of one policy in the format of eval.json."""
    return {
        "digest": digest_of(policy),
        "label": cfg.label or label,
        "policy": policy,
        "k": cfg.k,
        "split": cfg.split.value,
        "items": cfg.items.value,
        "tasks": sorted({f"{item.env}/{item.subset}" for item in plays}),
        "num_items": len(plays),
        **all_scores(plays, k=cfg.k),
    }


def write_entry(run_dir: RunDir, entry: dict[str, Any]) -> str:
    """Add the row to eval.json, or replace the one with the same `ROW_KEY`; return eval.md's text.

    Raises: ConfigError: eval.json was not written by this command.
    """
    path = run_dir.root / "eval.json"
    entries: list[dict[str, Any]] = []
    if path.exists():
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: not a file of evaluations ({error!r}); move it") from error
    keys = [_key_of(row) for row in entries]
    if _key_of(entry) in keys:
        entries[keys.index(_key_of(entry))] = entry
    else:
        entries.append(entry)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    text = as_markdown(entries)
    write_json(path, {"entries": entries})
    write_atomically(run_dir.root / "eval.md", text)
    return text


def _key_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the values that identify a row. A row of an older version lacks some."""
    return [row.get(name) for name in ROW_KEY]


@dataclass(slots=True, kw_only=True)
class ItemListing:
    """The hub's data on each environment: listed test items, their turn limit, and a note."""

    items: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    turns: dict[str, int] = field(default_factory=dict[str, int])
    notes: dict[str, str] = field(default_factory=dict[str, str])


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


def catalogue_of(cfg: RunConfig, url: str, token: str) -> HubCatalogue:
    """Return the hub's catalogue.

    Raises: ConfigError: it lacks a task or has no item at a distance.
    """
    subsets = subsets_in_use(cfg.curriculum, cfg.tasks)
    timeout_s = cfg.actor.env_timeout_s
    catalogue = fetch_catalogue(url, token=token, timeout_s=timeout_s, subsets=subsets)
    validate_tasks(cfg.tasks, catalogue, cfg.curriculum)
    return catalogue


def evaluate(cfg: EvalConfig, run_dir: RunDir, *, scores_path: Path | None = None) -> int:
    """Play held-out items with one policy, write and print the tables; return the exit code.

    Args:
        scores_path: file for the row of this policy alone, in the format of eval.json.
    """
    hub_cfg, hub_dir = command_part(cfg, run_dir, "eval")
    with (
        hold_run(hub_dir.root, name="eval"),
        serve_hub(hub_cfg, hub_dir) as (url, token),
        serve_opponents(hub_cfg, hub_dir),
    ):
        hub_dir.finished.unlink(missing_ok=True)
        listed = fetch_listed(cfg, hub_url=url, token=token)
        catalogue = catalogue_of(cfg, url, token)
        episodes = plan_heldout(cfg.eval, cfg.tasks, catalogue, listed.items, listed.turns)
        notes = listed.notes
        for line in described(episodes, notes):
            print(line)
        code = run(
            cfg, run_dir, episodes, hub_url=url, token=token, notes=notes, scores_path=scores_path
        )
        if code == 0:
            mark_finished(hub_dir, version=0, result="")
        return code


def fetch_listed(cfg: EvalConfig, *, hub_url: str, token: str) -> ItemListing:
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
    cfg: EvalConfig,
    run_dir: RunDir,
    episodes: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str,
    notes: Mapping[str, str] = NO_NOTES,
    scores_path: Path | None = None,
) -> int:
    """Play the episodes that the journal lacks, write and print the tables; return the exit code.

    The tables of the run directory keep one row for each policy, its settings and the selection of
    items. So policies that are evaluated under the same `run.name` can be compared.

    Returns:
        0, or 1 if the evaluation is incomplete: it ended early, or more than `eval.max_failed_frac`
            of the episodes had an infrastructure failure.
    """
    folder = run_dir.root / "eval"
    policy = {
        **describe_policy(cfg.policy, cfg.model, cfg.actor, style=cfg.envhub.style),
        "envs": digest_of_envs(cfg.envs, cfg.envhub.envs),
    }
    prefix = f"eval-{digest_of(policy)}"  # Episode ids differ between policies and settings.
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
    print(write_entry(run_dir, entry))
    if scores_path is not None:
        write_json(scores_path, entry)
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

        def policy(_: PlannedEpisode) -> tuple[StreamingAct, Render]:
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
