"""Commands for environments: serve a standalone hub, list tasks, check requirements."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from actor.agents.harnesses import harness_of, root_of
from common.config.curriculum import subsets_in_use
from common.config.eval import EvalSplit
from common.config.load import config_as_yaml, load_config, without_secrets
from common.config.run_config import RunConfig
from common.config.tasks import TaskSection, why_not_far
from common.errors import ConfigError
from common.formats.turns import FirstPrompt
from common.log import configure_logging
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.text import known_hint
from envhub.catalogue.content import changed_content, contents_of
from envhub.catalogue.distances import counted, measured
from envhub.catalogue.health import hub_at, not_served, servers_of, silent, untrainable
from envhub.catalogue.registry import (
    LOADERS,
    Registry,
    UnknownEnv,
    is_reference,
    missing_requirements,
)
from envhub.env import Style
from tools.cli.requested import on_loopback

SHORT_KEYS = {"port": "envhub.port", "host": "envhub.host", "token": "envhub.token"}


def run_hub(overrides: Sequence[str], *, is_dry: bool) -> int:
    """Serve a standalone hub until a signal stops it; return the exit code.

    Args:
        overrides: `env=a,b port=8080 host= token=`, and keys of the configuration.
        is_dry: only print the configuration.

    Raises: ConfigError: an environment cannot be served, or the address cannot be bound.
    """
    cfg = load_alone(overrides)
    if is_dry:
        print(config_as_yaml(without_secrets(cfg)), end="")
        return 0
    configure_logging("envhub", cfg.log.level)
    names = with_remote(cfg.envhub.envs or _all_that_run(cfg), cfg)
    missing = _lacking(names, cfg)
    if missing:  # Report missing requirements before the slow import below.
        raise ConfigError("; ".join(missing))
    from envhub.main import serve_alone

    def started(address: str) -> None:
        print(f"environments: {', '.join(names)}")
        print(f"hub: {address} (pages: {address}/docs)")

    try:
        serve_alone(cfg, names, started=started)
    except (UnknownEnv, ValueError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        address = f"{cfg.envhub.host}:{cfg.envhub.port}"
        reason = error.strerror or error
        raise ConfigError(f"envhub.port: cannot bind {address}: {reason}") from error
    return 0


def missing_for(cfg: RunConfig, *, is_to_train: bool = True) -> list[str]:
    """Return the missing requirements of a run's environments, one line each; [] if there are none.

    If the run uses an external hub (`envhub.url`), check instead that it answers, accepts the token
    and offers the tasks.
    """
    lacking, mistakes = examine(cfg, is_to_train=is_to_train)
    return lacking or mistakes


def examine(cfg: RunConfig, *, is_to_train: bool = True) -> tuple[list[str], list[str]]:
    """Return the missing requirements of a run's environments and the errors in its tasks.

    An error in a task is the same on every machine. An external hub that does not answer counts as
    a missing requirement.

    Args:
        is_to_train: the tasks are also trained on, and not only evaluated.
    """
    if url := cfg.envhub.url:
        if lacking := silent([hub_at(url)]):
            return lacking, []
        has_keys = RunDir(root=ROOT / cfg.run.dir / cfg.run.name).keys.exists()
        token = cfg.envhub.token
        tasks = cfg.tasks
        return [], not_served(url, token, tasks, may_be_own=has_keys, is_to_train=is_to_train)
    if harness_of(cfg.actor.agent):  # Sandboxes show its folder, which is empty until a start.
        root_of(cfg.actor).mkdir(parents=True, exist_ok=True)
    tasks = {task.env for task in cfg.tasks}
    references = [name for name in tasks if is_reference(name)]
    if references:
        line = f"env: {references[0]}: add it to envhub.envs=[...], and use its own name in tasks"
        return [], [line]
    names = with_remote(sorted({*tasks, *cfg.envhub.envs}), cfg)
    lacking = _lacking(names, cfg)
    usable = [name for name in names if not lacking or not _lacking([name], cfg)]
    try:
        registry = Registry(usable, cfg.envs, cfg.env)
    except UnknownEnv as error:
        return lacking, [f"{_key_of(str(error), cfg)}: {error}"]
    wrong = _wrong_tasks(cfg, registry, is_to_train=is_to_train)
    folder = RunDir(root=ROOT / cfg.run.dir / cfg.run.name).root
    return lacking, wrong or changed_content(folder, contents_of(registry))


def check_prompts(cfg: RunConfig) -> str:
    """Check that first prompts fit into the context; return a sentence about their lengths."""
    from actor.formats import checks

    return checks.check_prompts(cfg, first_prompts(cfg))


def first_prompts(cfg: RunConfig) -> Iterator[FirstPrompt]:
    """Yield the first prompts that a run's environments have before the start.

    There are none for an external hub, and none for environments that cannot run here.

    Raises: ConfigError: a prompt cannot be made.
    """
    if cfg.envhub.url:
        return
    names = {task.env for task in cfg.tasks}
    usable = [name for name in sorted({*names, *cfg.envhub.envs}) if not _lacking([name], cfg)]
    registry = Registry(usable, cfg.envs, cfg.env)
    style = Style(cfg.envhub.style)
    for spec in (registry.spec(name) for name in registry.names if name in names):
        tools = [{**each} for each in spec.tools]
        for prompt in spec.prompts() if spec.prompts is not None else ():
            yield replace(
                prompt,
                instruction=spec.instruction.get(style, ""),
                acknowledgement=spec.acknowledgement.get(style, ""),
                tools=prompt.tools or tools,
            )


def _wrong_tasks(cfg: RunConfig, registry: Registry, *, is_to_train: bool) -> list[str]:
    """Return why tasks cannot be drawn from the registry's environments, one line each."""
    tasks = {i: task for i, task in enumerate(cfg.tasks) if task.env in registry.names}
    unknown = [
        f"tasks[{i}].subset={task.subset!r}: {task.env} has no subset"
        f" {task.subset!r}{known_hint(task.subset, registry.spec(task.env).subsets)}"
        for i, task in tasks.items()
        if task.subset not in registry.spec(task.env).subsets
    ]
    if unknown:
        return unknown
    if cfg.eval.split is EvalSplit.VALIDATION:
        lines = [
            f"eval.split=validation: {task.env}/{task.subset} has no validation items; use"
            " eval.split=test"
            for task in tasks.values()
            if task.weight > 0 and not registry.spec(task.env).subsets[task.subset].num_validation
        ]
        if lines:
            return lines
    empty = _untrainable(tasks, registry) if is_to_train else []
    return empty or _too_far(cfg, tasks, registry)


def _untrainable(tasks: Mapping[int, TaskSection], registry: Registry) -> list[str]:
    """Return the tasks without training items, one line each."""
    lines: list[str] = []
    for i, task in tasks.items():
        lines += untrainable(i, task, registry.spec(task.env).subsets[task.subset].num_train)
    return lines


def _too_far(cfg: RunConfig, tasks: Mapping[int, TaskSection], registry: Registry) -> list[str]:
    """Return why tasks have no items at their configured distances, one line each."""
    lines: list[str] = []
    for i, task in tasks.items():
        names = subsets_in_use(cfg.curriculum, [task])
        spec = registry.spec(task.env)
        lengths = counted(measured(spec, task.subset, cfg.envs)) if names else {}
        whys = [why_not_far(task, lengths, name.removeprefix(f"{task.env}/")) for name in names]
        lines += [f"tasks[{i}].distance={task.distance}: {why}" for why in whys if why][:1]
    return lines


def examine_environments(cfg: RunConfig) -> dict[str, list[str]]:
    """Return the missing requirements of each environment; [] if it can run here."""
    return {name: _lacking([name], cfg) for name in with_remote([*LOADERS], cfg)}


def spell_out(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with `env= port= host= token=` written as keys of the config."""
    spelt: list[str] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if equals and key == "env":
            names = [name.strip() for name in value.strip("[]").split(",")]
            override = f"envhub.envs={json.dumps([name for name in names if name])}"
        elif equals and key in SHORT_KEYS:
            override = f"{SHORT_KEYS[key]}={value}"
        spelt.append(override)
    return spelt


def load_alone(overrides: Sequence[str]) -> RunConfig:
    """Return the config of a standalone hub. It has no model."""
    overrides = ["model.path=unset", *spell_out(overrides)]
    return on_loopback(load_config(None, overrides))


def _lacking(names: Sequence[str], cfg: RunConfig) -> list[str]:
    """Return missing programs, missing files and silent servers of environments, one line each."""
    missing = missing_requirements(names, cfg.envs, cfg.env)
    return missing or silent(servers_of(names, cfg.envs, cfg.env))


def with_remote(names: Sequence[str], cfg: RunConfig) -> list[str]:
    """Return the names, plus the name of the AgentGym server if one is configured."""
    return [*dict.fromkeys([*names, *filter(None, [cfg.env.dialect])])]


def _all_that_run(cfg: RunConfig) -> list[str]:
    """Return the environments that can run here; print why others cannot."""
    missing = {name: _lacking([name], cfg) for name in LOADERS}
    for lines in filter(None, missing.values()):
        print(f"not served: {'; '.join(lines)}")
    return [name for name, lines in missing.items() if not lines]


def _key_of(refusal: str, cfg: RunConfig) -> str:
    """Return the config key that names the refused environment."""
    refused = refusal.partition(";")[0]
    for i, task in enumerate(cfg.tasks):
        if repr(task.env) in refused:
            return f"tasks[{i}].env={task.env!r}"
    return "envhub.envs"
