"""Models by name: `org/name[@revision]` becomes a folder of the Hugging Face cache.

A name is resolved once, on the node that starts the run. The configuration then holds the folder
of one commit, `model.source` the name with its commit, `model.commits` the commits of all names.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

from common.config.model import ModelSection
from common.config.run_config import Config, RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import starts_anew
from learner.policy.model_kind import check_kind

logger = logging.getLogger(__name__)

NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>[\w./-]+))?"
)
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
WEIGHT_FILES = ("*.safetensors",)
HUB_TIMEOUT_S = 10.0
HTTP_LIBRARIES = ("httpx", "httpx2", "requests")  # Those of the versions of huggingface_hub.
INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """One commit of a repository in the local cache."""

    repository: str
    commit: str
    folder: Path

    @property
    def source(self) -> str:
        """Name with its commit, as in `model.source`."""
        return f"{self.repository}@{self.commit}"


def is_hub_name(path: str) -> bool:
    """Return whether a path is the name of a repository, not a local path.

    A path is local if it exists, or if its first folder exists below `root`.
    """
    if NAME.fullmatch(path) is None or path.endswith(".gguf"):
        return False
    return not (ROOT / path).exists() and not (ROOT / path.split("/", 1)[0]).is_dir()


def resolve_models(cfg: Config, *, is_dry: bool = False, may_stand_in: bool = False) -> Config:
    """Return the config with folders in place of all names of models.

    An unfinished run keeps the commit of each name with which it began, even if a branch or a tag
    is another commit now.

    Args:
        is_dry: weights that are not in the cache are not fetched.
        may_stand_in: if the files of `model.path` cannot be fetched, `model.architecture` is used.

    Raises: ConfigError: a file is missing and cannot be fetched; the message has the remedies.
    """
    names = _Names(cfg)
    model = cfg.model
    if model.architecture and is_hub_name(model.architecture):
        hub_model = names.resolve("model.architecture", model.architecture, has_weights=False)
        model = replace(model, architecture=str(hub_model.folder))
        if cfg.model.path == cfg.model.architecture:  # It stands in for the model of a dry run.
            return replace(cfg, model=replace(model, path=str(hub_model.folder)))
    if is_hub_name(model.path):
        try:
            hub_model = names.resolve("model.path", model.path, has_weights=not is_dry)
        except ConfigError as error:
            if not (may_stand_in and model.architecture):
                raise
            logger.warning("%s. The plan has the sizes of %s", error, model.architecture)
            model = replace(model, path=model.architecture, source=names.kept_name(model.path))
        else:
            model = _with_folder(model, hub_model, is_dry=is_dry)
    algorithm = cfg.algorithm
    if is_hub_name(algorithm.reference_path):
        key = "algorithm.reference_path"
        hub_model = names.resolve(key, algorithm.reference_path, has_weights=not is_dry)
        algorithm = replace(algorithm, reference_path=str(hub_model.folder))
    teacher = algorithm.teacher
    if is_hub_name(teacher.path):
        key = "algorithm.teacher.path"
        hub_model = names.resolve(key, teacher.path, has_weights=not is_dry)
        algorithm = replace(algorithm, teacher=replace(teacher, path=str(hub_model.folder)))
    critic = cfg.learner.critic
    if is_hub_name(critic.path):
        hub_model = names.resolve("learner.critic.path", critic.path, has_weights=not is_dry)
        critic = replace(critic, path=str(hub_model.folder))
    learner = replace(cfg.learner, critic=critic)
    if names.commits:
        model = replace(model, commits={**model.commits, **names.commits})
    return replace(cfg, model=model, algorithm=algorithm, learner=learner)


def is_unfetched(path: str) -> bool:
    """Return whether a folder of the cache lacks weights, which a start downloads."""
    folder = ROOT / path
    is_cached = Path(_cache_folder()) in folder.parents and folder.is_dir()
    return is_cached and bool(_missing_files(folder, has_weights=True))


def download_lines(cfg: RunConfig) -> list[str]:
    """Return a line for each model whose weights a start downloads, for `--dry-run`."""
    paths = {
        "model.path": cfg.model.path,
        "algorithm.reference_path": cfg.algorithm.reference_path,
        "algorithm.teacher.path": cfg.algorithm.teacher.path,
        "learner.critic.path": cfg.learner.critic.path,
    }
    return [
        f"download: {key} needs {_sized_weights(ROOT / path)} of"
        f" {(ROOT / path).parents[1].name.removeprefix('models--').replace('--', '/')}"
        for key, path in paths.items()
        if path and is_unfetched(path)
    ]


def _sized_weights(folder: Path) -> str:
    """Return the names of the missing weights, and the size that the index has."""
    names = ", ".join(_missing_files(folder, has_weights=True))
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return f"{names} (the whole model has {index['metadata']['total_size'] / 1e9:,.1f} GB)"
    except (OSError, ValueError, LookupError, TypeError):  # The size is optional.
        return names


class _Names:
    """Resolves the names in one configuration and collects their commits."""

    def __init__(self, cfg: RunConfig) -> None:
        self._cfg = cfg
        self.commits: dict[str, str] = {}

    @cached_property
    def _kept(self) -> Mapping[str, str]:
        """The names of an unfinished run: name in the configuration -> name with commit."""
        run = self._cfg.run
        run_dir = RunDir(root=ROOT / run.dir / run.name)
        if starts_anew(self._cfg, run_dir):
            return {}
        source = run_dir.read_source()
        named = {source.partition("@")[0]: source} if source else {}
        commits = run_dir.read_commits().items()
        return named | {name: f"{name.partition('@')[0]}@{commit}" for name, commit in commits}

    def kept_name(self, name: str) -> str:
        """Return the name with the commit with which the run began; without one, the name."""
        return self._kept.get(name, name)

    def resolve(self, key: str, name: str, *, has_weights: bool = True) -> HubModel:
        """Return the commit of a name. Raises: ConfigError: as `resolve_models`."""
        pinned = self.kept_name(name)
        hub_model = _resolve(key, pinned, has_weights=has_weights)
        self.commits[name] = hub_model.commit
        if pinned != name:
            _warn_if_moved(key, name, hub_model.commit)
        return hub_model


def _with_folder(model: ModelSection, hub_model: HubModel, *, is_dry: bool) -> ModelSection:
    """Return the section with a folder. Without weights, the folder is also the architecture."""
    path = str(hub_model.folder)
    is_stand_in = is_dry and bool(_missing_files(hub_model.folder, has_weights=True))
    architecture = path if is_stand_in else model.architecture
    return replace(model, path=path, source=hub_model.source, architecture=architecture)


def _warn_if_moved(key: str, name: str, commit: str) -> None:
    """Log that the cache has another commit under a name than the run."""
    repository, _, revision = name.partition("@")
    newest = _cached(repository, revision or None, SMALL_FILES, key=key)
    if newest is not None and newest.name != commit:
        text = "the run keeps the commit with which it began key=%s name=%s commit=%s newer=%s"
        logger.warning(text, key, name, commit, newest.name)


@cache
def _resolve(key: str, name: str, *, has_weights: bool = True) -> HubModel:
    """Return the local commit of a model by its name, after a download of missing files."""
    match = NAME.fullmatch(name)
    assert match is not None, name
    repository, revision = match["repository"], match["revision"]
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if has_weights else ())]
    folder = _cached(repository, revision, patterns, key=f"{key}={name}")
    problem = ""
    if not _is_pinned(revision) or folder is None or _missing_files(folder, has_weights):
        folder, problem = _fetch(repository, revision, SMALL_FILES, cached=folder)
        if folder is not None:
            check_kind(folder, key=key, shown=name)  # Before weights that could not be used.
        if has_weights and not problem:
            folder, problem = _fetch(repository, revision, patterns, cached=folder)
    lacking = _missing_files(folder, has_weights)
    if folder is None or lacking:
        words = f"{repository} --revision {revision}" if revision else repository
        raise ConfigError(
            f"{key}={name}: the cache lacks {', '.join(lacking)} of {name}, and the files could not"
            f" be fetched ({problem or 'the repository does not have them'}). Run `hf download"
            f" {words}` on a machine with a network and copy its cache to {_cache_folder()}, or"
            f" give {key}=FOLDER with a local copy of the model"
        )
    if problem and not _is_offline():
        logger.warning("model hub unreachable, using the cache source=%s (%s)", name, problem)
    return HubModel(repository=repository, commit=folder.name, folder=folder)


def _is_offline() -> bool:
    """Return whether the environment demands the cache alone (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _is_pinned(revision: str | None) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", revision or "") is not None


def _cached(
    repository: str, revision: str | None, patterns: Sequence[str], *, key: str
) -> Path | None:
    """Return the folder of a commit in the cache, None if the cache has no part of it.

    Raises: ConfigError: no repository can have this name.
    """
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    hub: Any = huggingface_hub
    try:
        folder = hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), local_files_only=True
        )
    except HFValidationError as error:
        raise ConfigError(f"{key}: {_first_line(error)}") from error
    except LocalEntryNotFoundError as error:
        # A listing of the commit shows missing files; the folder has the others.
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else _with_short_commit(repository, revision)
    return Path(folder)


def _with_short_commit(repository: str, revision: str | None) -> Path | None:
    """Return the folder of the only cached commit that begins with a revision, None for none."""
    if re.fullmatch(r"[0-9a-f]{7,39}", revision or "") is None:
        return None
    folder = Path(_cache_folder()) / f"models--{repository.replace('/', '--')}" / "snapshots"
    matching = list(folder.glob(f"{revision}*"))
    return matching[0] if len(matching) == 1 else None


def _fetch(
    repository: str, revision: str | None, patterns: Sequence[str], *, cached: Path | None
) -> tuple[Path | None, str]:
    """Download the missing files; return the folder and "", or `cached` and the problem.

    The commit is requested first: an unreachable hub is then found at once, without retries. The
    files are requested by the name of the revision, so that the cache also finds them without a
    network.
    """
    import huggingface_hub

    hub: Any = huggingface_hub
    wanted = list(patterns)
    try:
        hub.HfApi().model_info(repository, revision=revision, timeout=HUB_TIMEOUT_S)
        folder = hub.snapshot_download(repository, revision=revision, allow_patterns=wanted)
    except (OSError, *_transport_errors()) as error:  # No network, repository, access or proxy.
        return cached, _first_line(error)
    return Path(folder), ""


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the bases of the errors of the HTTP library that this huggingface_hub uses.

    A wrong proxy variable of the shell is a ValueError or, for SOCKS, an ImportError.
    """
    libraries = [sys.modules[name] for name in HTTP_LIBRARIES if name in sys.modules]
    names = ("HTTPError", "InvalidURL")
    errors = [getattr(each, name) for each in libraries for name in names if hasattr(each, name)]
    return (*errors, ValueError, ImportError)


def _missing_files(folder: Path | None, has_weights: bool) -> list[str]:
    """Return the names of the files that a model needs and the folder lacks."""
    if folder is None:
        return ["config.json", "tokenizer.json", *(["model.safetensors"] if has_weights else [])]
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any((folder / name).is_file() for name in TOKENIZERS):
        missing.append("tokenizer.json")
    if not has_weights:
        return missing
    index = folder / INDEX
    if not index.is_file():
        # A cache whose copy is incomplete has links to missing files.
        has_some = any(each.is_file() for each in folder.glob("*.safetensors"))
        return missing if has_some else [*missing, "model.safetensors"]
    return [*missing, *(name for name in _shards_of(index) if not (folder / name).is_file())]


def _shards_of(index: Path) -> list[str]:
    """Return the names of the files of weights. Raises: ConfigError: the index is damaged."""
    try:
        files: object = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted(set(map(str, cast(Iterable[object], files))))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index}: has no list of files (weight_map); remove the file and fetch it again"
        ) from error


def _cache_folder() -> str:
    """Return the folder of huggingface_hub's cache."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
