"""Prepares the run directory of a start: new, resumed, or with a finished run renamed first."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.config.load import config_as_yaml
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.chat_template import read_template, template_at, today
from common.formats.turn_ends import GENERATION_CONFIG
from common.repository import ROOT, git_revision
from common.store.run_dir import RunDir, read_json, write_atomically, write_json

logger = logging.getLogger(__name__)

OWN_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", OWN_TEMPLATE)
# A resumed run must be the same experiment: these keys must have equal values.
SAME_KEYS = (
    "run.seed",
    "train.mode",
    "model.path",
    "model.dtype",
    "model.chat_template",
    "model.chat_template_kwargs",
    "actor.keep_thinking",
    "tasks",
    "groups.size",
    "learner.optimizer",
    "envhub.style",
    "eval.split",
)
_NEWER_KEYS = (
    "model.chat_template",
    "model.chat_template_kwargs",
    "actor.keep_thinking",
    "eval.split",
)


def mark_finished(run_dir: RunDir, *, version: int, result: str) -> None:
    """Write the file that marks the run as finished. The next start is then a new run."""
    write_json(run_dir.finished, {"version": version, "result": result})


def load_finished(run_dir: RunDir) -> dict[str, Any]:
    """Return the content of the file of `mark_finished`.

    Raises: ConfigError: the file is damaged; names it.
    """
    remedy = "remove the file; the run then counts as unfinished, and the same command continues it"
    return read_json(run_dir.finished, {"version": int, "result": str}, remedy=remedy)


def prepare(cfg: RunConfig, run_dir: RunDir) -> Path | None:
    """Prepare the run directory; return the new path of an earlier run, None if none was renamed.

    A finished run is renamed to `<name>.1`, `<name>.2`, and so on. It is resumed instead if it is
    the same experiment and `train.num_steps` is larger now.

    Raises:
        ConfigError: the directory has an unfinished run of another experiment; names the keys
            that differ.
    """
    if not run_dir.config.exists():
        return None
    differences = [*_differences(cfg, run_dir), *_other_date(cfg, run_dir)]
    if run_dir.finished.exists():
        if starts_anew(cfg, run_dir) or differences:
            return _rename_run(run_dir)
        run_dir.finished.unlink()
    elif differences:
        raise ConfigError(
            f"run.name={cfg.run.name}: this name has an unfinished run with other settings "
            f"({'; '.join(differences)}). Use another run.name, or move {run_dir.root} away"
        )
    return None


def starts_anew(cfg: RunConfig, run_dir: RunDir) -> bool:
    """Return whether the directory has a finished run that `train.num_steps` does not continue.

    Raises: ConfigError: as `load_finished`.
    """
    if not run_dir.finished.exists():
        return False
    return load_finished(run_dir)["version"] >= cfg.train.num_steps


def dated(cfg: RunConfig, run_dir: RunDir, *, is_kept: bool) -> RunConfig:
    """Return the configuration with a `model.date`, the date that all prompts of the run contain.

    The first of these dates is used: the configured date, the date in the run directory, the date
    of the run whose checkpoint the model is, today.

    Args:
        is_kept: whether to write the date to the run directory for later starts.
    """
    date = run_dir.read_date()
    of_model = (RunDir(root=each).read_date() for each in Path(cfg.model.path).parents[:3])
    day = cfg.model.date or date or next(filter(None, of_model), "") or today()
    if is_kept:
        run_dir.root.mkdir(parents=True, exist_ok=True)
    if is_kept and not date:
        write_atomically(run_dir.date, f"{day}\n")
    return replace(cfg, model=replace(cfg.model, date=day))


def _other_date(cfg: RunConfig, run_dir: RunDir) -> list[str]:
    """Return the difference between configured and kept date, [] if equal or if one is missing."""
    was = run_dir.read_date()
    now = cfg.model.date
    return [f"model.date: was {was}, now {now}"] if was and now and was != now else []


def keep_tokenizer(cfg: RunConfig, run_dir: RunDir) -> None:
    """Copy the policy's tokenizer to the run directory, to decode the token ids of the journal.

    A tokenizer in another format than `tokenizer.json` is converted, so that the pages and the
    exports of the run need no other files.
    """
    source = ROOT / cfg.model.path
    run_dir.tokenizer.mkdir(parents=True, exist_ok=True)
    if (source / TOKENIZER_FILES[0]).is_file():
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                _copy_atomically(source / name, run_dir.tokenizer / name)
    else:
        _convert_tokenizer(source, run_dir.tokenizer)
    if (source / GENERATION_CONFIG).is_file():  # It names ends of a turn.
        _copy_atomically(source / GENERATION_CONFIG, run_dir.tokenizer / GENERATION_CONFIG)
    if template := template_at(cfg.model):  # Written without a byte order mark.
        write_atomically(run_dir.tokenizer / OWN_TEMPLATE, read_template(template))


def _copy_atomically(source: Path, target: Path) -> None:
    """Replace a file by a copy. A dashboard may read it while the run starts again."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(source, partial)
    partial.replace(target)


def _convert_tokenizer(source: Path, folder: Path) -> None:
    """Write the tokenizer in transformers' own format; log a warning if that fails."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer
    try:
        tokenizer.from_pretrained(str(source), local_files_only=True).save_pretrained(str(folder))
    except (OSError, ValueError, KeyError, ImportError) as error:
        text = "cannot keep the tokenizer, tokens are shown as ids folder=%s error=%r"
        logger.warning(text, source, error)


def _differences(cfg: RunConfig, run_dir: RunDir) -> list[str]:
    """Return the settings that differ from those of the run, and must not."""
    old = OmegaConf.load(run_dir.config)
    new = OmegaConf.create(config_as_yaml(cfg))
    lines: list[str] = []
    for key in SAME_KEYS:
        was = _same_value(old, key)
        now = _same_value(new, key)
        is_older = was is None and key in _NEWER_KEYS  # The run is of a version without the key.
        if was != now and not is_older:
            lines.append("tasks differ" if key == "tasks" else f"{key}: was {was}, now {now}")
    return lines


def _same_value(cfg: Any, key: str) -> Any:
    """Return the value to compare; a model with a name is the same in another cache."""
    value = OmegaConf.select(cfg, key)
    if key != "model.path":
        return value
    if source := OmegaConf.select(cfg, "model.source"):
        return source
    # The folder of dequantised weights has a digest of the quantised ones in its name.
    return Path(value).name if OmegaConf.select(cfg, "model.quantised") else value


def _rename_run(run_dir: RunDir) -> Path:
    """Rename the folder of an earlier run; return its new path."""
    number = 1
    while (target := run_dir.root.with_name(f"{run_dir.root.name}.{number}")).exists():
        number += 1
    run_dir.root.rename(target)
    logger.info("renamed the earlier run folder=%s", target)
    return target


def save_config(cfg: RunConfig, path: Path) -> None:
    """Write every resolved value as YAML that `load_config` reads back to an equal config.

    The file has mode 0600, because it may contain the token of a hub.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, config_as_yaml(cfg, revision=git_revision()), mode=0o600)
