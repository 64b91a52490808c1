"""Loader: dataclass defaults, then a YAML file with its `defaults` chain, then overrides."""

import copy
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.config.envs import EnvsSection, choose_env
from common.config.keys import conform, declared, dotted, expand_sections, show
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.text import counted, near_hint

# The start of a path in the home of a user, perhaps after a kind as in yaml:~/tasks.yaml.
HOME = re.compile(r"(?P<kind>[a-z]\w*:)?(?=~[\w.-]*(?:/|$))")
_DEFAULTS = "defaults"  # The only YAML key outside of the schema.
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # The one in C is five times as fast.


def load_config(
    config: str | None, overrides: Sequence[str], *, root: Path, is_dry: bool = False
) -> RunConfig:
    """Return the configuration of a run.

    Args:
        config: a name (`configs/<name>.yaml` below `root`) or a YAML file; None: defaults only.
        overrides: "section.key=value" each; text values are not parsed.
        root: the repository.
        is_dry: model.architecture replaces a missing model.path.

    Returns:
        The checked configuration. The default of `run.name` is the config's name.

    Raises: ConfigError: one line with the key, the value and the expected value.
    """
    try:
        trees = [] if config is None else _read_trees(find_config(config, root=root), root)
        merged = copy.deepcopy(_merged(_Trees(repr(trees), trees)))
        seen = _apply_overrides(merged, overrides)
        _derive(merged, is_dry=is_dry)
        if merged.envhub.style == "auto":
            merged.envhub.style = _style_of_policy(merged, root)
        missing = sorted(OmegaConf.missing_keys(merged)) if _may_lack_values(merged) else []
        if missing:
            key = missing[0]
            _, key_field = declared(key, shown=key)
            raise ConfigError(f"{key} is not set: give {key}=... ({key_field.metadata['text']})")
        if "groups.min_size" not in seen and not any("min_size" in _groups(each) for each in trees):
            merged.groups.min_size = max(1, min(merged.groups.min_size, merged.groups.size))
        choices = [task for task in merged.tasks if "|" in task.env]
        if choices:
            envs = cast(EnvsSection, OmegaConf.to_object(merged.envs))
            for task in choices:
                task.env = choose_env(task.env, envs)
        return cast(RunConfig, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "config"
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True, slots=True)
class _Trees:
    """YAML trees in their order; equal texts mean equal trees."""

    text: str
    content: list[dict[str, Any]] = field(compare=False)


@lru_cache(maxsize=128)  # A command loads its configuration several times.
def _merged(trees: _Trees) -> DictConfig:
    """Return the defaults, changed by trees. A copy takes a third of the time of a merge."""
    merged = copy.deepcopy(_declared_defaults())
    for tree in trees.content:
        merged = OmegaConf.unsafe_merge(merged, tree)
    _unfreeze(merged)
    return cast(DictConfig, merged)


@lru_cache(maxsize=1)
def _declared_defaults() -> DictConfig:
    """Return the defaults of all keys. A copy takes a quarter of the time of `structured`."""
    return OmegaConf.structured(RunConfig)


def _read_trees(path: Path, root: Path) -> list[dict[str, Any]]:
    """Return the trees of a YAML file and its `defaults` chain; the file's name is the run's."""
    trees = _read_chain(path, root=root)
    trees[0]["run"] = {"name": path.stem} | (trees[0].get("run") or {})
    return trees


def load_received(text: str, overrides: Sequence[str], *, root: Path) -> RunConfig:
    """Return the configuration of a role from the YAML sections that its run has sent.

    Raises: ConfigError: as `load_config`.
    """
    with tempfile.NamedTemporaryFile(
        "w", prefix="longstride-", suffix=".yaml", encoding="utf-8"
    ) as file:
        file.write(text)
        file.flush()
        return load_config(file.name, overrides, root=root)


def with_home(value: Any) -> Any:
    """Return a value of a configuration with `~/` at the start of its texts as the home.

    A shell expands `~` only at the start of a word, so not in run.dir=~/runs.
    """
    if isinstance(value, str):
        home = HOME.match(value)
        if home is None:
            return value  # It may be a member of an enum.
        return value[: home.end()] + os.path.expanduser(value[home.end() :])
    if isinstance(value, list):
        return [with_home(item) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: with_home(item) for key, item in cast(dict[Any, Any], value).items()}
    return value


def word_with_home(word: str) -> str:
    """Return a word of the command line, also key=value, with `~/` as the home."""
    name, equals, value = word.partition("=")
    return f"{name}={with_home(value)}" if equals else str(with_home(word))


def list_configs(root: Path) -> list[str]:
    """Return the names of the configs that are part of the project."""
    return sorted(path.stem for path in (root / "configs").glob("*.yaml"))


def find_config(config: str, *, root: Path) -> Path:
    """Return the file for a value of `--config`.

    Raises: ConfigError: neither a file nor a known name; the message lists the known names.
    """
    for path in (root / "configs" / f"{config}.yaml", Path(config)):
        if os.path.isfile(path):  # isfile is False for an overlong name.
            return path
    known = list_configs(root)
    hint = near_hint(Path(config).stem, known, form=str)
    raise ConfigError(
        f"--config {show(config)}: no such config{hint} (there are: {', '.join(known)})"
    )


def without_secrets(cfg: RunConfig) -> RunConfig:
    """Return a config for display or transfer: without tokens and credentials in URLs."""

    def bare(url: str) -> str:
        return re.sub(r"(?<=://)[^/]*@", "hidden@", url)

    token = "hidden" if cfg.envhub.token else ""
    envhub = replace(cfg.envhub, token=token, url=bare(cfg.envhub.url))
    return replace(cfg, envhub=envhub, env=replace(cfg.env, url=bare(cfg.env.url)))


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


def _read_chain(path: Path, *, root: Path) -> list[dict[str, Any]]:
    """Return the YAML trees of the `defaults` chain, from its base to `path` itself."""
    chain: list[dict[str, Any]] = []
    seen: list[Path] = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{path}: the chain of `defaults` returns to this file; remove one")
        seen.append(path.resolve())
        base, tree = _read(path)
        chain.insert(0, tree)
        if base is None:
            return chain
        path = _find_base(base, path, root=root)


def _find_base(base: Any, path: Path, *, root: Path) -> Path:
    """Return the file that `defaults` in the file at `path` refers to."""
    for folder in (path.parent, root / "configs"):
        if isinstance(base, str) and "/" not in base and os.path.isfile(folder / f"{base}.yaml"):
            return folder / f"{base}.yaml"
    law = "expects the name, without .yaml, of a file in the same folder or in configs/"
    raise ConfigError(f"{path}: defaults={show(base)}: {law}")


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return `defaults` of a YAML file (None if missing) and its checked sections."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    try:
        tree = copy.deepcopy(_parse_yaml(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date.
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        where = "" if line is None else f" line {line + 1}"
        problem = getattr(error, "problem", error)
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}") from error
    except OSError:  # OmegaConf raises it for a number or a date.
        tree = text.strip()
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expects sections at the top, not {show(tree)}")
    sections = cast(dict[Any, Any], tree)
    base = sections.pop(_DEFAULTS, None)
    try:
        return base, with_home(conform(expand_sections(sections), RunConfig, key=""))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@lru_cache(maxsize=32)
def _parse_yaml(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)


def _derive(merged: DictConfig, *, is_dry: bool) -> None:
    """Derive the number of a role's processes from its GPUs, unless the config sets it."""
    model = merged.model
    learner = merged.learner
    actor = merged.actor
    if is_dry and OmegaConf.is_missing(model, "path") and model.architecture:
        model.path = model.architecture
    if learner.num_gpus and learner.num_ranks == 1:
        learner.num_ranks = learner.num_gpus
    if learner.num_ranks == 1:
        learner.num_ranks = learner.num_nodes * max(1, learner.ranks_per_node)
    # The constraints of both keys are checked later.
    width = max(1, actor.tensor_parallel_size) * max(1, actor.engines_per_process)
    if actor.num_gpus and actor.num_gpus % width == 0 and actor.num_actors == 1:
        actor.num_actors = actor.num_gpus // width


def _style_of_policy(merged: DictConfig, root: Path) -> str:
    """Return the style of the prompts on which the policy was trained, or `instructed`."""
    model = merged.model
    if merged.policy.url or OmegaConf.is_missing(model, "path"):
        return "instructed"
    folders = (root / folder for folder in (model.path, model.architecture) if folder)
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


def _groups(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    return tree.get("groups") or {}


def _apply_overrides(merged: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Set the overrides in the merged configuration; return them by key. Raises: ConfigError."""
    seen: dict[str, str] = {}
    for override in overrides:
        key, equals, raw = override.partition("=")
        if not equals:
            raise ConfigError(f"{override}: an override is key=value, like learner.lr=1e-4")
        kind, _ = declared(key, shown=override)
        name = dotted(key)
        if name in seen:
            raise ConfigError(f"{override}: {key} is given twice, first as {seen[name]}")
        seen[name] = override
        value = parse_text(raw) if kind is str else conform(parse_value(raw, key), kind, key=key)
        value = with_home(value)
        _add_user_section(merged, name, shown=override)
        OmegaConf.update(merged, name, value, merge=True)
        _unfreeze(OmegaConf.select(merged, name.partition(".")[0]))  # It may have new nodes.
    return seen


def _add_user_section(merged: DictConfig, name: str, *, shown: str) -> None:
    """Add the sections of a user-named key (`per_env.x.kind`); refuse too high an index."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        above = ".".join(parts[:i])
        section = ".".join(parts[: i + 1])
        kind, _ = declared(section, shown=section)
        held = OmegaConf.select(merged, above)
        if parts[i].isdigit() and int(parts[i]) >= len(held):
            num = counted(len(held), "entry", "entries")
            raise ConfigError(f"{shown}: {above} has {num}; the first has index 0")
        if is_dataclass(kind) and OmegaConf.select(merged, section) is None:
            held[parts[i]] = OmegaConf.structured(kind)
            _unfreeze(merged)


# OmegaConf checks each access to a node, so a walk over all nodes reads their content directly.


def _unfreeze(node: Any) -> None:
    """Make nodes writable that OmegaConf marks read-only because their class is frozen."""
    if OmegaConf.is_config(node):
        OmegaConf.set_readonly(node, None)
        for child in _children(node):
            _unfreeze(child)


def _may_lack_values(node: Any) -> bool:
    """Return whether a value is missing, or may refer to a missing one."""
    children = _children(node)
    if not children:
        value = node._value()
        return isinstance(value, str) and (value == MISSING or "${" in value)
    return any(map(_may_lack_values, children))


def _children(node: Any) -> list[Any]:
    """Return the nodes below a map or a list; [] for a node without any."""
    content = node._content if OmegaConf.is_config(node) else None
    if isinstance(content, dict):
        return list(cast(dict[Any, Any], content).values())
    return cast(list[Any], content) if isinstance(content, list) else []


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


def check_training(cfg: RunConfig) -> None:
    """Check that an episode fits in a microbatch, and that sessions outlast turns.

    Raises: ConfigError: the message has the key and the value.
    """
    budget = cfg.learner.max_tokens_per_microbatch
    longest = cfg.actor.max_model_len
    if cfg.learner.row_tokens < longest:
        ranks = cfg.learner.sequence_ranks
        over = f" / learner.sequence_ranks={ranks}" * (ranks > 1)
        law = f"must be >= actor.max_model_len={longest}{over}, the tokens of the longest episode"
        raise ConfigError(f"learner.max_tokens_per_microbatch={budget}: {law}")
    lease_s = cfg.envhub.session_lease_s
    turn_s = cfg.actor.turn_timeout_s
    if not cfg.envhub.url and lease_s < turn_s:
        law = f"must be >= actor.turn_timeout_s={turn_s:g}: a session is silent during a turn"
        raise ConfigError(f"envhub.session_lease_s={lease_s:g}: {law}")
