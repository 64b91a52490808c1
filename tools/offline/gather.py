"""The command `gather`: makes a checkpoint whole whose files are on the disks of several nodes."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.join.files import is_intact
from common.repository import ROOT
from common.store.run_dir import RunDir, sync_folder
from common.text import counted
from learner.policy.model import load_policy
from learner.training.checkpoint import complete_checkpoints, export, newest_checkpoint, sync_tree
from learner.training.shards import MANIFEST, TENSORS, ShardFile, gather_command, read_manifest
from tools.cli.command_line import ParsedCommand
from tools.cli.requested import load_joined
from tools.copies.store import open_target
from tools.dequantise.models import plain_models

STEP = "step="
PART_BYTES = 16 << 20


def gather(request: ParsedCommand) -> int:
    """Copy the missing files of a checkpoint into it; return the exit code: 1 if some are missing.

    The words of the request without "=" are folders or URLs with such files.

    Raises: ConfigError: the run or the checkpoint does not exist, or its manifest is damaged.
    """
    sources = [word for word in request.overrides if "=" not in word]
    steps = [word for word in request.overrides if word.startswith(STEP)]
    others = [word for word in request.overrides if word not in (*sources, *steps)]
    cfg = load_joined(replace(request, overrides=others))
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    checkpoint = _checkpoint(run_dir, steps[-1].removeprefix(STEP) if steps else "")
    files = read_manifest(checkpoint)
    if not files:
        print(f"{checkpoint} is whole")
        return 0
    if missing := gather_files(checkpoint, files, sources):
        for line in _missing_lines(checkpoint, files, missing):
            print(line)
        return 1
    make_whole(plain_models(cfg), checkpoint)
    print(f"{checkpoint} is whole: {counted(len(files), 'file')} of other nodes, and the policy")
    return 0


def _checkpoint(run_dir: RunDir, step: str) -> Path:
    """Return the checkpoint of a step, or the newest one. Raises: ConfigError: there is none."""
    checkpoints = dict(complete_checkpoints(run_dir.checkpoints))
    if not step and (newest := newest_checkpoint(run_dir.checkpoints)):
        return newest
    if not step.isdigit() or int(step) not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise ConfigError(f"{STEP}{step}: {run_dir.checkpoints} has the complete steps: {steps}")
    return checkpoints[int(step)]


def gather_files(
    checkpoint: Path, files: Sequence[ShardFile], sources: Sequence[str]
) -> list[ShardFile]:
    """Copy the files that a checkpoint lacks from folders or URLs; return those still missing.

    A file is also copied from its path on its node, if this machine has that path. Each copy is
    compared with the digest of the manifest.
    """
    places = [open_target(source, key="gather") for source in sources]
    listed = [(fs, fs.find(folder, detail=True)) for fs, folder in places]
    local, _ = open_target(str(checkpoint), key="gather")
    missing: list[ShardFile] = []
    for file in files:
        target = checkpoint / TENSORS / file.name
        candidates = [(local, file.path)] if Path(file.path).is_file() else []
        candidates += [(fs, name) for fs, names in listed for name in _similar(file, names)]
        if is_intact(target, file):
            continue
        source = next((name for fs, name in candidates if _copy(fs, name, file, target)), None)
        if source is None:
            missing.append(file)
        else:
            print(f"copied {file.name} from {source}")
    return missing


def _similar(file: ShardFile, names: dict[str, Any]) -> Iterator[str]:
    """Yield the paths with the name and size of a file, those of the same checkpoint first."""
    same = [
        name
        for name, entry in names.items()
        if name.rpartition("/")[2] == file.name and entry["size"] == file.num_bytes
    ]
    checkpoint = Path(file.path).parent.name
    yield from sorted(same, key=lambda name: checkpoint not in name)


def _copy(fs: Any, name: str, file: ShardFile, target: Path) -> bool:
    """Copy and sync a file if it has the digest of the manifest; return whether it has."""
    partial = target.with_name(f".{target.name}.partial")
    digest = hashlib.sha256()
    with fs.open(name, "rb") as source, partial.open("wb") as out:
        while part := source.read(PART_BYTES):
            digest.update(part)
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != file.sha256:
        partial.unlink()
        return False
    partial.rename(target)
    sync_folder(target.parent)
    return True


def _missing_lines(
    checkpoint: Path, files: Sequence[ShardFile], missing: Sequence[ShardFile]
) -> Iterator[str]:
    """Yield lines about the files that are still missing, with commands that copy them."""
    yield f"{checkpoint} lacks {len(missing)} of {counted(len(files), 'file')} of other nodes:"
    for file in missing:
        is_other = (checkpoint / TENSORS / file.name).exists()
        yield f"  {file.describe()}{'; the file here has another digest' * is_other}"
    yield "copy them from their nodes:"
    for file in missing:
        yield f"  {file.scp_line(checkpoint)}"
    yield f"then run: {gather_command(checkpoint)}"


def make_whole(cfg: RunConfig, checkpoint: Path) -> None:
    """Write the policy of a checkpoint that has all its files, and remove its manifest.

    Raises: ConfigError: `model.path` of the run is missing.
    """
    model = load_policy(cfg.model.path, device="cpu", lora=cfg.learner.lora, is_skeleton=True)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    export(checkpoint, model, tokenizer, None)
    sync_tree(checkpoint)
    (checkpoint / MANIFEST).unlink()
    sync_folder(checkpoint)
