"""The action `fetch` of the command `journal`: it brings a run back from a store."""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from common.config.knobs import FILE_NAME
from common.errors import ConfigError
from common.store.run_dir import sync_folder
from tools.copies.manifest import FOLDER, CopyManifest, StoredFile, split_text
from tools.copies.store import ObjectStore

FETCH_TRIES = 3  # Copies that are tried, since a running run removes old ones.


def fetch(url: str, runs: Path, *, name: str = "") -> Path:
    """Restore the newest whole copy below a URL; return the new run directory.

    Each part is compared with its digest. The directory appears at its place when it is complete.

    Args:
        url: the URL of one copy, or `journal.copy_to` of a run.
        runs: folder of the new run directory.
        name: name of the new run; "": the name of the copied run.

    Raises: ConfigError: there is no copy, several, a damaged one, or the directory exists; OSError.
    """
    store = _find_copy(url)
    try:
        for number in range(1, FETCH_TRIES + 1):
            manifest = store.newest_manifest()
            if manifest is None:
                raise ConfigError(f"{store.url}: no whole copy of a run")
            target = runs / (name or manifest.run)
            if target.exists():
                raise ConfigError(f"{target}: exists; give another name with to=NAME")
            try:
                _restore(store, manifest, target)
            except FileNotFoundError as error:
                if number == FETCH_TRIES:
                    raise ConfigError(f"{store.url}: a part is missing ({error})") from error
                continue
            print(_summary(manifest, target))
            return target
    finally:
        store.close()
    raise AssertionError


def _find_copy(url: str) -> ObjectStore:
    """Return the store of the only copy at a URL, or directly below it. Raises: ConfigError."""
    store = ObjectStore(url, key="fetch")
    folders = store.folders()
    if FOLDER in folders:
        return store
    store.close()
    if not folders:
        raise ConfigError(f"{store.url}: holds no copy. Name the journal.copy_to of a run")
    if len(folders) > 1:
        problem = f"holds the copies {', '.join(folders)}"
        raise ConfigError(f"{store.url}: {problem}; name one, such as {store.url}/{folders[0]}")
    return ObjectStore(f"{store.url}/{folders[0]}", key="fetch")


def _restore(store: ObjectStore, manifest: CopyManifest, target: Path) -> None:
    """Write all files beside the target, sync them, and move them there."""
    partial = target.with_name(f".{target.name}.fetch.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        store.each(lambda name: _write(store, partial / name, manifest.files[name]), manifest.files)
        partial.rename(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(store: ObjectStore, path: Path, file: StoredFile) -> None:
    """Write one file part by part. Raises: ConfigError: a part is damaged; OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as handle:
        for part in file.parts:
            content = store.read_part(part.digest)
            if len(content) != part.size:
                raise ConfigError(f"{path.name}: damaged, its manifest has another size")
            handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())


def _summary(manifest: CopyManifest, target: Path) -> str:
    """Return a line about a restored copy."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.at))
    version = manifest.checkpoint
    step = f"a checkpoint of step {version}" if version >= 0 else "no checkpoint"
    split = manifest.split_checkpoints
    lacks = f"; {split_text(split)}" if split else ""
    return (
        f"fetched {target}: {len(manifest.files)} files, {manifest.num_bytes / 1e6:.1f} MB,"
        f" {step}, copied at {when}{lacks}"
    )


def fetch_run(url: str, options: Mapping[str, str], *, runs: Path) -> int:
    """Restore a run from its copy; return the exit code: 1 if the store failed.

    Raises: ConfigError: there is no whole copy, or the run exists.
    """
    name = options.get("to", "")
    if name and not FILE_NAME.fits(name):
        raise ConfigError(f"to={name}: must be {FILE_NAME.phrase}")
    try:
        fetch(url, runs, name=name)
    except OSError as error:
        print(f"error: {url} was not fetched: {error}")
        return 1
    return 0
