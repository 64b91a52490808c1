"""One episode of each task before a run starts: it is opened, and one action is scored.

The code of environments and rewards may hang or end its process. So a process of its own plays the
episodes, except for the package's own fast environments. All of its processes end with the trial.
"""

import json
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.config.load import config_as_yaml, load_config
from common.config.run_config import RunConfig
from common.errors import EnvError, TrialFailed
from common.formats.turns import FirstPrompt
from common.host.child_process import ChildProcess, describe_exit, find_error
from common.log import configure_logging
from common.repository import CODE
from envhub.catalogue.registry import Registry, missing_requirements
from envhub.env import EnvFailure, EnvSpec, Isolation, Style, UnknownItem
from envhub.errors import ServicePaused
from envhub.hosting.worker_main import as_json
from tools.author.checks import max_turns_of
from tools.author.episodes import Driver, RecordedPlay

logger = logging.getLogger(__name__)

LOAD_S = 60.0  # Seconds to start the process and to load an environment.
POLL_S = 0.1  # Polling interval of the other process.
TAIL_LINES = 5
Note = Callable[[str], None]  # Receives what the trial does next.


def try_episodes(cfg: RunConfig) -> list[FirstPrompt]:
    """Play the begin of one episode of each task; return the first prompts.

    An environment is not tried if it is at `envhub.url` or cannot run here. One whose service, such
    as a judge of this run, does not answer yet is not tried either. The log names them.

    Raises: TrialFailed: the environment or the reward failed, ended its process, or took longer
        than a call may take; names the item and the error.
    """
    if cfg.envhub.url:
        logger.info("no episode was tried before the start: envhub.url is another process's hub")
        return []
    specs = _specs(cfg)
    prompts: list[FirstPrompt] = []
    apart: list[str] = []
    for name, spec in specs.items():
        if spec.isolation is Isolation.INLINE:
            prompts += _try(cfg, spec, note=lambda _: None)
        else:
            apart.append(name)
    return prompts + (_try_apart(cfg, {name: specs[name] for name in apart}) if apart else [])


def _specs(cfg: RunConfig) -> dict[str, EnvSpec]:
    """Return the environments of the tasks that can run here, by name."""
    names = {task.env for task in cfg.tasks}
    served = sorted({*names, *cfg.envhub.envs})
    usable = [name for name in served if not missing_requirements([name], cfg.envs, cfg.env)]
    registry = Registry(usable, cfg.envs, cfg.env)
    return {name: registry.spec(name) for name in registry.names if name in names}


def _try(cfg: RunConfig, spec: EnvSpec, *, note: Note) -> list[FirstPrompt]:
    """Play one episode of each subset of an environment. Raises: TrialFailed."""
    style = Style(cfg.envhub.style)
    prompts: list[FirstPrompt] = []
    subsets = dict.fromkeys(task.subset for task in cfg.tasks if task.env == spec.name)
    items = [f"{name}-train-0" for name in subsets if spec.subsets[name].num_train]
    with Driver(spec, style) as driver:
        for item_id in items:
            where = f"the first episode of {spec.name} (item {item_id})"
            try:
                if spec.service is not None and (why := driver.call(spec.service)):
                    raise ServicePaused(str(why))
                note(f"{where}: reset")
                with driver.open(item_id) as episode:
                    prompts.append(_prompt_of(spec, style, episode))
                    _answer(spec, episode, note=partial(note, f"{where}: step"))
            except ServicePaused as error:
                logger.warning("no episode of %s was tried: %s", spec.name, error)
            except (EnvError, UnknownItem) as error:
                raise TrialFailed(f"{where} failed: {_reason_of(error)}") from error
    return prompts


def _reason_of(error: Exception) -> str:
    """Return an error, with the file and the line of the user's code that caused it."""
    cause: BaseException = error
    text = str(error.__cause__) if isinstance(error.__cause__, EnvFailure) else str(error)
    while cause.__cause__ is not None:
        cause = cause.__cause__
    frames = traceback.extract_tb(cause.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(CODE / "envhub"):
        return text
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})"


def _answer(spec: EnvSpec, episode: RecordedPlay, *, note: Callable[[], None]) -> None:
    """Score the reference answer of an item, or any action where the item has none."""
    actions: list[str] = list(episode.call("valid_actions"))
    reference = episode.call("expert_action") if spec.takes_any_text else None
    action = reference if reference is not None else next(iter(actions), None)
    num_turns = max_turns_of(spec, episode.item_id) if spec.takes_any_text else 1
    for _ in range(num_turns):
        if action is None or episode.is_over:
            return
        note()
        result = episode.step(action)
        episode.driver.call(partial(as_json, result))


def _prompt_of(spec: EnvSpec, style: Style, episode: RecordedPlay) -> FirstPrompt:
    """Return the first prompt of an opened episode."""
    before: list[dict[str, Any]] = []
    if hasattr(episode.env, "first_messages"):
        before = list(episode.call("first_messages"))
    return FirstPrompt(
        env=spec.name,
        place=episode.item_id,
        messages=[*before, {"role": "user", "content": episode.first}],
        instruction=spec.instruction.get(style, ""),
        acknowledgement=spec.acknowledgement.get(style, ""),
        tools=[{**each} for each in spec.tools],
        may_be_cut=spec.prompts is None,
    )


# --- in a process of its own ------------------------------------------------------------------


def _try_apart(cfg: RunConfig, specs: dict[str, EnvSpec]) -> list[FirstPrompt]:
    """Play the episodes in another process. Raises: TrialFailed."""
    call_s = max(spec.step_timeout_s or cfg.envhub.step_timeout_s for spec in specs.values())
    with tempfile.TemporaryDirectory(prefix="longstride-trial-") as folder:
        events = Path(folder) / "events.jsonl"
        with _process(cfg, Path(folder), list(specs)) as process:
            last: dict[str, Any] = {}
            what = "the load of the run's environments"
            limit_s = LOAD_S
            began_at = time.monotonic()
            while not process.has_ended_by(time.monotonic() + POLL_S):
                if (event := _last(events)) != last:
                    last = event
                    limit_s = call_s
                    began_at = time.monotonic()
                elif time.monotonic() - began_at > limit_s:
                    raise TrialFailed(f"{last.get('doing', what)} took longer than {limit_s:g} s")
            last = _last(events)
            if "prompts" in last:
                return [FirstPrompt(**each) for each in last["prompts"]]
            if "error" in last:
                raise TrialFailed(last["error"])
            end = describe_exit(process.poll() or 0)
            why = find_error(process.log_tail(max_lines=TAIL_LINES))
            raise TrialFailed(f"{last.get('doing', what)} ended its process: {end}: {why}")


@contextmanager
def _process(cfg: RunConfig, folder: Path, names: list[str]) -> Iterator[ChildProcess]:
    """Run the process of a trial; its descendants end with the context."""
    config = folder / "config.yaml"
    config.touch(mode=0o600)  # It may contain the token of a hub.
    config.write_text(config_as_yaml(cfg), encoding="utf-8")
    paths = [str(CODE), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = ChildProcess(
        "trial",
        [sys.executable, "-m", "tools.author.trial", str(folder), *names],
        log_path=folder / "log",
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        yield process
    finally:
        process.clear_away()


def _last(events: Path) -> dict[str, Any]:
    """Return the last whole event of the trial's process; {} before the first one."""
    try:
        text = events.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    lines = text[: text.rfind("\n") + 1].splitlines()  # An event may be written in parts.
    return json.loads(lines[-1]) if lines else {}


def main(argv: list[str]) -> None:
    """Try the named environments with the configuration in a folder, and write events there."""
    folder = Path(argv[0])
    configure_logging("trial", "WARNING")
    cfg = load_config(str(folder / "config.yaml"), [])

    def write(**event: Any) -> None:
        with (folder / "events.jsonl").open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(event) + "\n")

    specs = _specs(cfg)
    try:
        prompts: list[FirstPrompt] = []
        for name in argv[1:]:
            prompts += _try(cfg, specs[name], note=lambda doing: write(doing=doing))
    except TrialFailed as error:
        write(error=str(error))
    else:
        write(prompts=[asdict(each) for each in prompts])


if __name__ == "__main__":
    main(sys.argv[1:])
