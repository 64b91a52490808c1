"""The models of a command without quantisation, for `model.path` and the other keys of models."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common.config.model import BaseFormat, ModelSection
from common.config.run_config import Config, RunConfig
from common.errors import ConfigError
from common.host.machine import has_cuda
from common.repository import ROOT
from tools.dequantise.base import find_base
from tools.dequantise.cache import cache_folder, dequantise
from tools.dequantise.checkpoints import GGUF, Quantised, find_quantised
from tools.dequantise.record import Record, is_complete, read_record


def plain_models(
    cfg: Config, *, is_dry: bool = False, is_served: bool = False, is_trained: bool = True
) -> Config:
    """Return the config with folders of dequantised weights in place of quantised checkpoints.

    Each quantised checkpoint is dequantised once, into the cache. The engines of a teacher, of
    opponents and of `serve` run a folder of quantised weights themselves if this machine has a GPU.

    Args:
        is_dry: write nothing to the cache. A checkpoint that is not in it gets an outline: a
            temporary folder with its configuration, its tokenizer and the sizes of its weights.
        is_served: only an engine computes the policy.
        is_trained: adapters of the policy are trained, so `model.base` rounds its weights.

    Raises: ConfigError: a checkpoint cannot be dequantised; names the key and the remedy.
    """
    folders = _Folders(cfg, is_dry=is_dry)
    model = cfg.model
    source = _source_if_lost(model)
    find = folders.played if is_served else folders.plain
    path = find("model.path", source)
    is_lost = source != model.path  # A folder of the cache, which a start may have rounded.
    if (is_trained and not is_served) or is_lost:
        path = folders.rounded("model.path", path, model.base)
    if is_lost and Path(path).name != Path(model.path).name:
        raise ConfigError(
            f"model.path={model.path}: the folder is missing, and {model.quantised}, its source,"
            f" gives other weights now ({Path(path).name}). Restore it, or begin another run"
        )
    record = read_record(ROOT / path)
    model = replace(
        model,
        path=path,
        quantised=record.source if record else "",
        architecture=folders.plain("model.architecture", model.architecture, is_outline=True),
    )
    algorithm = replace(
        cfg.algorithm,
        reference_path=folders.plain("algorithm.reference_path", cfg.algorithm.reference_path),
        teacher=replace(
            cfg.algorithm.teacher,
            path=folders.played("algorithm.teacher.path", cfg.algorithm.teacher.path),
        ),
    )
    critic = cfg.learner.critic
    critic = replace(critic, path=folders.plain("learner.critic.path", critic.path))
    seats = cfg.actor.seats
    models = {each: folders.played("actor.seats.opponents", each) for each in seats.folders()}
    seats = replace(
        seats,
        opponents=[models.get(each, each) for each in seats.opponents],
        eval_opponents=[models.get(each, each) for each in seats.eval_opponents],
    )
    return replace(
        cfg,
        model=model,
        algorithm=algorithm,
        learner=replace(cfg.learner, critic=critic),
        actor=replace(cfg.actor, seats=seats),
    )


def _source_if_lost(model: ModelSection) -> str:
    """Return the path of the policy; the quantised source of a folder that is missing."""
    is_lost = not (ROOT / model.path).exists()
    return model.quantised if is_lost and (ROOT / (model.quantised or "-")).exists() else model.path


class _Folders:
    """Finds the folder of the dequantised weights for each quantised checkpoint."""

    def __init__(self, cfg: RunConfig, *, is_dry: bool) -> None:
        self._cache = cache_folder(cfg.model.cache_folder)
        self._dtype = "float32" if cfg.model.dtype == "float32" else "bfloat16"
        self._is_dry = is_dry
        self._outlines: dict[str, str] = {}

    def played(self, key: str, path: str) -> str:
        """Return the folder of a model that only an engine computes."""
        model = self._find(key, path)
        if model is None or (model.kind != GGUF and has_cuda()):
            return path
        return self.plain(key, path)

    def plain(self, key: str, path: str, *, is_outline: bool = False) -> str:
        """Return the folder of a model without quantisation; the same path for another model.

        Args:
            is_outline: the sizes of the model suffice.

        Raises: ConfigError: it cannot be dequantised.
        """
        if path in self._outlines:
            return self._outlines[path]
        model = self._find(key, path)
        return path if model is None else self._folder_of(model, key, path, is_outline=is_outline)

    def _folder_of(self, model: Quantised, key: str, path: str, *, is_outline: bool) -> str:
        """Return the folder in the cache, or an outline of it."""
        folder = self._cache / model.name
        if is_complete(folder):
            return str(folder)
        if not (self._is_dry or is_outline):
            model.check()
            dequantise(model, folder, key=key)
            return str(folder)
        self._outlines[path] = str(_write_outline(model, folder))
        return self._outlines[path]

    def rounded(self, key: str, path: str, base: BaseFormat) -> str:
        """Return the folder of a policy with the numbers of `model.base`.

        Raises: ConfigError: it has weights without a quantised form.
        """
        model = find_base((ROOT / path).absolute(), base, self._dtype, key=key)
        return path if model is None else self._folder_of(model, key, path, is_outline=False)

    def _find(self, key: str, path: str) -> Quantised | None:
        return find_quantised(ROOT / path, self._dtype, key=key) if path else None


def _write_outline(quantised: Quantised, target: Path) -> Path:
    """Return a temporary folder with the small files of a checkpoint and the sizes of its weights.

    Args:
        target: folder in the cache that a start would write.

    Raises: ConfigError: the checkpoint cannot be dequantised.
    """
    parent = Path(tempfile.mkdtemp(prefix="longstride-outline-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / target.name
    folder.mkdir()
    quantised.write_small_files(folder)
    quantised.write_outline(folder, target)
    return folder


def weight_lines(cfg: RunConfig) -> list[str]:
    """Return a line for each model whose weights were quantised, for logs and `--dry-run`."""
    return [f"{key}: dequantised from {record.describe()}" for key, record in _records(cfg)]


def disk_needs(cfg: RunConfig) -> tuple[int, int, Path] | None:
    """Return the bytes that a start dequantises, the free bytes, and the folder; None for none."""
    records = {record.folder: record for _, record in _records(cfg) if record.needed_bytes}
    if not records:
        return None
    folder = Path(next(iter(records))).parent
    above = next(each for each in (folder, *folder.parents) if each.exists())
    needed = sum(record.needed_bytes for record in records.values())
    return needed, shutil.disk_usage(above).free, folder


def disk_lines(cfg: RunConfig) -> list[str]:
    """Return a line with the disk space that a start needs for dequantised weights; or []."""
    needs = disk_needs(cfg)
    if needs is None:
        return []
    needed, free, folder = needs
    text = f"{folder} needs {needed / 1e9:,.2f} GB for dequantised weights"
    return [f"disk: {text}, and {free / 1e9:,.1f} GB are free"]


def with_cache_paths(text: str, cfg: RunConfig) -> str:
    """Return a text with the folders of the cache in place of temporary outlines."""
    for path in _paths(cfg).values():
        record = read_record(ROOT / path)
        if record is not None:
            text = text.replace(path, record.folder)
    return text


def _paths(cfg: RunConfig) -> dict[str, str]:
    """Return the paths of all models by key."""
    paths = {
        "model.path": cfg.model.path,
        "algorithm.reference_path": cfg.algorithm.reference_path,
        "algorithm.teacher.path": cfg.algorithm.teacher.path,
        "learner.critic.path": cfg.learner.critic.path,
    }
    opponents = {f"actor.seats.opponents={each}": each for each in cfg.actor.seats.folders()}
    return {key: path for key, path in (paths | opponents).items() if path}


def _records(cfg: RunConfig) -> Iterator[tuple[str, Record]]:
    for key, path in _paths(cfg).items():
        if (record := read_record(ROOT / path)) is not None:
            yield key.partition("=")[0], record
