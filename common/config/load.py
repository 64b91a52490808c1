"""Loader: dataclass defaults, then a YAML file with its `defaults` chain, then overrides."""

import copy
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum
from functools import cache, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from common.config.envs import EnvsSection, choose_env
from common.config.keys import (
    COMMAND_KEYS,
    REMOVED_KEYS,
    RENAMED_KEYS,
    RENAMED_VALUES,
    Tree,
    build,
    commands_of,
    conform,
    declared,
    default_tree,
    default_value,
    dotted,
    expand_sections,
    has_key,
    renamed_value,
    show,
)
from common.config.run_config import Config, RunConfig
from common.errors import ConfigError
from common.repository import CODE, ROOT, shipped
from common.text import counted, near_hint

logger = logging.getLogger(__name__)

# The start of a path in a user's home or in configs/, perhaps after a kind as in yaml:~/tasks.yaml.
BASE = re.compile(r"(?P<kind>[a-z]\w*:)?(?=~[\w.-]*(?:/|$)|configs/)")
RUN_CONFIG = "config.yaml"  # Name of the stored configuration of a run.
_DEFAULTS = "defaults"  # The only YAML key outside of the schema.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # The one in C is five times as fast.


def load_config(
    config: str | None,
    overrides: Sequence[str],
    *,
    is_dry: bool = False,
    schema: type[Config] = RunConfig,  # type: ignore[assignment]
) -> Config:
    """Return the configuration of a run.

    Args:
        config: a name (`configs/<name>.yaml` below `root`) or a YAML file; None: defaults only.
        overrides: "section.key=value" each; text values are not parsed.
        is_dry: model.architecture replaces a missing model.path.
        schema: the configuration class of the command.

    Returns:
        The checked configuration. The default of `run.name` is the config's name.

    Raises: ConfigError: one line with the key, the value and the expected value.
    """
    settings: Tree = {}
    if config is not None:
        path = find_config(config)
        settings = {"run": {"name": path.stem}}
        for tree in _read_chain(path, schema=schema):
            settings = _merged(settings, tree)
    return _loaded(settings, overrides, is_dry=is_dry, schema=schema)


def load_received(text: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a role from the YAML sections that its run has sent.

    Raises: ConfigError: as `load_config`.
    """
    _, settings = _parse(text, "the configuration of the run", schema=RunConfig, is_stored=True)
    return _loaded(settings, overrides, is_dry=False, schema=RunConfig)


def _loaded(
    settings: Tree, overrides: Sequence[str], *, is_dry: bool, schema: type[Config]
) -> Config:
    """Return the configuration with the settings of files, then overrides."""
    tree = _merged(with_base(default_tree(schema)), settings)
    tree, seen = _apply_overrides(tree, overrides, schema=schema)
    tree = _resolved(tree, schema=schema) if _refers(tree) else copy.deepcopy(tree)
    _derive(tree, is_dry=is_dry)
    if tree["envhub"]["style"] == "auto":
        tree["envhub"]["style"] = _style_of_policy(tree)
    groups = tree["groups"]
    if "groups.min_size" not in seen and "min_size" not in settings.get("groups", {}):
        groups["min_size"] = max(1, min(groups["min_size"], groups["size"]))
    for task in tree["tasks"]:
        if "|" in task.get("env", ""):
            task["env"] = choose_env(task["env"], build(EnvsSection, tree["envs"], key="envs"))
    return build(schema, tree, key="")


def _merged(base: Tree, changes: Tree) -> Tree:
    """Return a tree with changes: maps are merged, all other values are replaced."""
    merged = dict(base)
    for name, value in changes.items():
        is_map = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = _merged(base[name], cast(Tree, value)) if is_map else value
    return merged


def _refers(value: Any) -> bool:
    """Return whether a text refers to another key or a variable, as "${...}"."""
    if isinstance(value, dict):
        return any(map(_refers, cast(Tree, value).values()))
    if isinstance(value, list):
        return any(map(_refers, cast(list[Any], value)))
    return isinstance(value, str) and "${" in value


def _resolved(tree: Tree, *, schema: type[Config]) -> Tree:
    """Return a tree with values in place of references. Raises: ConfigError."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), tree)
        return cast(Tree, OmegaConf.to_container(merged, resolve=True))
    except InterpolationToMissingValueError as error:
        key = str(error.full_key)
        text = declared(key, shown=key, schema=schema)[1].metadata["text"]
        raise ConfigError(f"{key} is not set: give {key}=... ({text})") from error
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


def with_base(value: Any) -> Any:
    """Return a value of a configuration with `~/` at the start of its texts as the home.

    A shell expands `~` only at the start of a word, so not in run.dir=~/runs. `configs/` is the
    folder of an installed package, unless the working directory has the path.
    """
    if isinstance(value, str):
        base = BASE.match(value)
        if base is None:
            return value  # It may be a member of an enum.
        return value[: base.end()] + shipped(os.path.expanduser(value[base.end() :]))
    if isinstance(value, list):
        return [with_base(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: with_base(item) for key, item in cast(dict[Any, Any], value).items()}
    return value


def word_with_base(word: str) -> str:
    """Return a word of the command line, also key=value, with `~/` as the home."""
    name, equals, value = word.partition("=")
    return f"{name}={with_base(value)}" if equals else str(with_base(word))


def list_configs() -> list[str]:
    """Return the names of the configs that are part of the project."""
    return sorted(path.stem for path in (CODE / "configs").glob("*.yaml"))


def find_config(config: str) -> Path:
    """Return the file for a value of `--config`.

    Raises: ConfigError: neither a file nor a known name; the message lists the known names.
    """
    for path in (CODE / "configs" / f"{config}.yaml", Path(config)):
        if os.path.isfile(path):  # isfile is False for an overlong name.
            return path
    names = list_configs()
    hint = near_hint(Path(config).stem, names, form=str)
    raise ConfigError(
        f"--config {show(config)}: no such config{hint} (there are: {', '.join(names)})"
    )


def without_secrets(cfg: RunConfig) -> RunConfig:
    """Return a config for display or transfer: without tokens and credentials in URLs."""
    token = "hidden" if cfg.envhub.token else ""
    envhub = replace(cfg.envhub, token=token, url=hide_credentials(cfg.envhub.url))
    return replace(cfg, envhub=envhub, env=replace(cfg.env, url=hide_credentials(cfg.env.url)))


def hide_credentials(text: str) -> str:
    """Return a text without the credentials of its URLs."""
    return re.sub(r"(?<=://)[^/\s]*@", "hidden@", text)


def config_as_yaml(cfg: RunConfig, *, revision: str = "") -> str:
    """Return the resolved config as YAML text, with the code's revision as its first line."""
    head = f"# code: git {revision}\n" if revision else ""
    tree = asdict(cfg, dict_factory=_plain)
    return head + yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


def sections_as_yaml(
    cfg: RunConfig, sections: Sequence[str], *, without: Mapping[str, Sequence[str]]
) -> str:
    """Return sections of the resolved config as YAML, without the keys in `without`."""
    tree = asdict(cfg, dict_factory=_plain)
    chosen = {name: tree[name] for name in sections}
    for name in chosen.keys() & without.keys():
        chosen[name] = {key: v for key, v in chosen[name].items() if key not in without[name]}
    return yaml.dump(chosen, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


def override_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the text that an override gives to `key`; None without such an override."""
    for override in overrides:
        name, equals, value = override.partition("=")
        if equals and dotted(name.strip()) == key:
            return parse_text(value)
    return None


def _read_chain(path: Path, *, schema: type[RunConfig]) -> list[Tree]:
    """Return the YAML trees of the `defaults` chain, from its base to `path` itself."""
    chain: list[Tree] = []
    seen: list[Path] = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: the chain of `defaults` returns to this file; remove one")
        seen.append(path.resolve())
        base, tree = _read(path, schema=schema)
        chain.insert(0, tree)
        if base is None:
            return chain
        path = _find_base(base, path)


def _find_base(base: Any, path: Path) -> Path:
    """Return the file that `defaults` in the file at `path` refers to."""
    for folder in (path.parent, CODE / "configs"):
        if isinstance(base, str) and "/" not in base and os.path.isfile(folder / f"{base}.yaml"):
            return folder / f"{base}.yaml"
    law = "expects the name, without .yaml, of a file in the same folder or in configs/"
    raise ConfigError(f"{path}: defaults={show(base)}: {law}")


def _used(tree: Tree, *, schema: type[RunConfig], is_stored: bool) -> Tree:
    """Return the sections of a file without keys of other commands and without removed ones.

    Renamed keys get their new names.

    Args:
        is_stored: the product wrote the file, so removed and renamed keys need no warning.
    """
    for old, new in RENAMED_KEYS.items():
        name, _, last = old.rpartition(".")
        renamed: Any = tree.get(name)
        if isinstance(renamed, dict) and last in renamed:
            value = cast(Tree, renamed).pop(last)
            used = renamed_value(old, value)
            cast(Tree, renamed).setdefault(new.rpartition(".")[2], used)
            if not is_stored:
                _warn(f"{old}={show(value)}: this key has a new name, {new}={show(used)}")
    for key in (*COMMAND_KEYS, *REMOVED_KEYS):
        name, _, last = key.rpartition(".")
        section: Any = tree.get(name) if name else tree
        if isinstance(section, dict) and last in section and not has_key(key, schema):
            value = cast(Tree, section).pop(last)
            if key in REMOVED_KEYS and not (is_stored and REMOVED_KEYS[key] in (None, value)):
                _check_removed(key, value)
    return tree


def _read(path: Path, *, schema: type[RunConfig]) -> tuple[Any, Tree]:
    """Return `defaults` of a YAML file (None if missing) and its checked sections."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    is_stored = path.name == RUN_CONFIG
    return _parse(text, str(path), schema=schema, is_stored=is_stored)


def _parse(text: str, source: str, *, schema: type[RunConfig], is_stored: bool) -> tuple[Any, Tree]:
    """Return `defaults` of a YAML text (None if missing) and its checked sections."""
    try:
        tree = copy.deepcopy(_parse_yaml(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date.
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" line {line + 1}"
        problem = getattr(error, "problem", error)
        raise ConfigError(f"{source}{where}: not valid YAML: {problem}") from error
    except OSError:  # OmegaConf raises it for a number or a date.
        tree = text.strip()
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expects sections at the top, not {show(tree)}")
    sections = cast(dict[Any, Any], tree)
    base = sections.pop(_DEFAULTS, None)
    try:
        used = _used(expand_sections(sections), schema=schema, is_stored=is_stored)
        return base, with_base(conform(used, schema, key="", schema=schema))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


@lru_cache(maxsize=32)
def _parse_yaml(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)


def _derive(tree: Tree, *, is_dry: bool) -> None:
    """Derive the number of a role's processes from its GPUs, unless the config sets it."""
    model = tree["model"]
    learner = tree["learner"]
    actor = tree["actor"]
    if is_dry and model["path"] == MISSING and model["architecture"]:
        model["path"] = model["architecture"]
    if learner["num_gpus"] and learner["num_ranks"] == 1:
        learner["num_ranks"] = learner["num_gpus"]
    if learner["num_ranks"] == 1:
        learner["num_ranks"] = learner["num_nodes"] * max(1, learner["ranks_per_node"])
    # The constraints of both keys are checked later.
    width = max(1, actor["tensor_parallel_size"]) * max(1, actor["engines_per_process"])
    if actor["num_gpus"] and actor["num_gpus"] % width == 0 and actor["num_actors"] == 1:
        actor["num_actors"] = actor["num_gpus"] // width


def _style_of_policy(tree: Tree) -> str:
    """Return the style of the prompts on which the policy was trained, or `instructed`."""
    model = tree["model"]
    if tree.get("policy", {}).get("url") or model["path"] == MISSING:
        return "instructed"
    folders = (ROOT / folder for folder in (model["path"], model["architecture"]) if folder)
    folder = next((path for path in folders if path.is_dir()), None)
    return "instructed" if folder is None else style_of_model(folder)


def style_of_model(folder: Path) -> str:
    """Return `prompt_style` of a model's config.json, `instructed` without one.

    Other faults of the file have their own checks. Raises: ConfigError: no such style.
    """
    path = folder / "config.json"
    try:
        settings: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return "instructed"
    if not isinstance(settings, dict):
        return "instructed"
    style = cast(dict[str, Any], settings).get("prompt_style", "instructed")
    if style not in ("compact", "instructed", "agentgym"):
        raise ConfigError(
            f"{path}: prompt_style={show(style)}: expects compact, instructed or agentgym"
        )
    return style


LONE_WORD = re.compile(r"[\w./-]+")


def _apply_overrides(
    tree: Tree, overrides: Sequence[str], *, schema: type[RunConfig]
) -> tuple[Tree, dict[str, str]]:
    """Return a tree with the overrides, and the overrides by key. Raises: ConfigError."""
    seen: dict[str, str] = {}
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: an override is key=value, like learner.lr=1e-4")
        name = dotted(key)
        if name in RENAMED_KEYS:
            used = renamed_value(name, parse_value(raw, key)) if name in RENAMED_VALUES else raw
            key = RENAMED_KEYS[name]
            _warn(f"{override}: this key has a new name, {key}={used}")
            name, raw = key, str(used)
        if commands := commands_of(name, schema):
            _warn(f"{override}: it is a key of {commands}, and this command does not read it")
            continue
        if name in REMOVED_KEYS:
            _check_removed(name, parse_value(raw, key))
            continue
        if name in seen:
            raise ConfigError(f"{override}: {key} is given twice, first as {seen[name]}")
        seen[name] = override
        if name == "actor.agent" and LONE_WORD.fullmatch(raw):
            raw = f"[{raw}]"  # The name of a harness, or a program without arguments.
        value = with_base(parse_override(key, raw, schema=schema))
        tree = _changed(tree, name.split("."), value, key="", shown=override, schema=schema)
    return tree, seen


def _check_removed(key: str, value: Any) -> None:
    """Warn of a key that has no effect. Raises: ConfigError: it has another value than before."""
    only = REMOVED_KEYS[key]
    if only is not None and value != only:
        raise ConfigError(f"{key}={show(value)}: must be in [{only:g}, {only:g}]")
    _warn(f"{key}={show(value)}: this key has no effect and will go; remove it")


@cache  # A command may load its configuration several times.
def _warn(text: str) -> None:
    logger.warning("%s", text)


def parse_override(key: str, raw: str, *, schema: type[RunConfig] = RunConfig) -> Any:
    """Return the value of an override, checked against the type of its key. Raises: ConfigError."""
    kind, _ = declared(key, shown=f"{key}={raw}", schema=schema)
    return parse_text(raw) if kind is str else conform(parse_value(raw, key), kind, key=key)


def _changed(
    value: Any, below: Sequence[str], change: Any, *, key: str, shown: str, schema: type[RunConfig]
) -> Any:
    """Return a value with a change at a place below it; refuse too high an index.

    Sections of new names (`per_env.x.kind`) begin with their defaults.
    """
    if not below:
        return _merged({"": value}, {"": change})[""]
    part, *rest = below
    if isinstance(value, list):
        entries = cast(list[Any], value)
        if not part.isdigit() or int(part) >= len(entries):
            num = counted(len(entries), "entry", "entries")
            raise ConfigError(f"{shown}: {key} has {num}; the first has index 0")
        entry = _changed(
            entries[int(part)], rest, change, key=f"{key}.{part}", shown=shown, schema=schema
        )
        return [*entries[: int(part)], entry, *entries[int(part) + 1 :]]
    section = f"{key}.{part}" if key else part
    tree = cast(Tree, value) if isinstance(value, dict) else {}
    if part not in tree:
        tree = tree | {part: default_value(declared(section, shown=section, schema=schema)[0])}
    return tree | {
        part: _changed(tree[part], rest, change, key=section, shown=shown, schema=schema)
    }


def parse_text(raw: str) -> str:
    """Return an override's text; the quotes around a whole value are taken off, as in YAML."""
    if raw[:1] not in ("'", '"') or raw[:1] != raw[-1:]:
        return raw
    try:
        parsed: object = yaml.safe_load(raw)
    except yaml.YAMLError:  # The quotes belong to parts of the text.
        return raw
    return parsed if isinstance(parsed, str) else raw


def parse_value(raw: str, key: str) -> Any:
    """Return an override's text as a YAML value. Raises: ConfigError."""
    try:
        parsed = OmegaConf.from_dotlist([f"value={raw}"])
        return cast(dict[str, Any], OmegaConf.to_container(parsed, resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={show(raw)}: the value is not valid YAML") from error


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: _without_enums(value) for key, value in items}


def _without_enums(value: object) -> object:
    if isinstance(value, list):
        return [_without_enums(each) for each in cast(list[object], value)]
    return value.value if isinstance(value, Enum) else value
