"""The manifest of a checkpoint whose files are on the disks of several nodes.

With `learner.checkpoint_shards=own_node` each further node writes the files of its ranks to its own
disk. The checkpoint's folder on rank 0's node then has a manifest, which lists them. `python run.py
gather` copies them into the folder and removes the manifest.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote

from pydantic import TypeAdapter, ValidationError

from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import read_json, write_json
from common.text import counted, is_file_name

MANIFEST = "shards.json"
TENSORS = "state"  # Folder of a checkpoint for the files of all ranks.
MAX_NAMED = 4  # Files that an error lists.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file of one rank on the disk of its node."""

    name: str  # Its name in the checkpoint's folder of tensors.
    node: int  # Number of the node.
    host: str  # Host name of the node.
    address: str  # Address of the node on the interface that reaches rank 0's node.
    path: str  # Absolute path on the node.
    num_bytes: int
    sha256: str

    def describe(self) -> str:
        """Return the file's node and path as text."""
        return f"node {self.node} ({self.host}): {self.path}"

    def scp_line(self, checkpoint: Path) -> str:
        """Return the command that copies the file into a checkpoint on this machine."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"scp {quote(f'{host}:{self.path}')} {quote(str(checkpoint / TENSORS))}/"


_FILES: TypeAdapter[list[ShardFile]] = TypeAdapter(list[ShardFile])


def write_manifest(checkpoint: Path, files: Iterable[ShardFile]) -> None:
    """Write the manifest of a checkpoint."""
    entries = [asdict(each) for each in sorted(files, key=lambda each: each.name)]
    write_json(checkpoint / MANIFEST, {"files": entries})


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint's folder has the files of all ranks and the plain model."""
    return not (checkpoint / MANIFEST).exists()


def read_manifest(checkpoint: Path) -> list[ShardFile]:
    """Return the files of a checkpoint that other nodes wrote; [] for a whole checkpoint.

    Raises: ConfigError: the manifest is damaged.
    """
    path = checkpoint / MANIFEST
    if is_whole(checkpoint):
        return []
    entries = read_json(path, {"files": list}, remedy=remedy_without(checkpoint))["files"]
    try:
        files = _FILES.validate_json(json.dumps(entries))
    except ValidationError as error:
        text = f"damaged, {error.errors()[0]['msg']}; {remedy_without(checkpoint)}"
        raise ConfigError(f"{path}: {text}") from error
    if wrong := [each.name for each in files if not is_file_name(each.name)]:
        raise ConfigError(f"{path}: damaged, {wrong[0]!r} is not a plain file name")
    # A node makes a folder with the name of the recorded one.
    if wrong := [each.path for each in files if not is_file_name(Path(each.path).parent.name)]:
        raise ConfigError(f"{path}: damaged, {wrong[0]!r} is not the path of a file in a folder")
    return files


def remedy_without(checkpoint: Path) -> str:
    """Return the advice for a checkpoint that cannot be read."""
    return f"move {checkpoint} away, and the run continues from the checkpoint before it"


def gather_command(checkpoint: Path) -> str:
    """Return the command that makes a checkpoint of a run whole."""
    run = checkpoint.absolute().parents[1]
    folder = "" if run.parent == ROOT / "runs" else f" run.dir={quote(str(run.parent))}"
    step = checkpoint.name.removeprefix("step-").removesuffix(".old")
    number = f" step={int(step)}" if step.isdigit() else ""
    return f"python run.py gather run.name={run.name}{folder}{number}"


def check_whole(checkpoint: Path, *, key: str, shown: str) -> None:
    """Check that a folder, the value of `key`, is no checkpoint with files on other nodes.

    Raises: ConfigError: it is; has the command that makes it whole.
    """
    if is_whole(checkpoint):
        return
    raise ConfigError(
        f"{key}={shown}: files of this checkpoint are on other nodes. `{gather_command(checkpoint)}"
        " [FOLDER ...]` makes it whole"
    )


def missing_text(checkpoint: Path, files: Sequence[ShardFile]) -> str:
    """Return the error for files of a checkpoint that no node of the learner has."""
    listed = "; ".join(each.describe() for each in files[:MAX_NAMED])
    others = f"; and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
    return (
        f"{checkpoint}: no node of this learner has {counted(len(files), 'file')} of it with the"
        f" digest of its manifest: {listed}{others}. Start the learner on these nodes with their"
        f" learner.shard_folder. Or copy the files, and run `{gather_command(checkpoint)} FOLDER`."
        f" Or {remedy_without(checkpoint)}"
    )
