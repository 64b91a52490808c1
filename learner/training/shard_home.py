"""The folder of a further node for the checkpoint files of its ranks."""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import LongstrideError
from common.store.run_dir import sync_folder
from learner.policy.weight_files import LOCAL
from learner.training.shards import ShardFile

logger = logging.getLogger(__name__)

ASIDE = ".old"  # Suffix of a checkpoint while another one of the same version replaces it.


class ShardNotWritten(OSError):
    """A node cannot write a file of a checkpoint. The text names the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHome:
    """The folder of a further node for the files of one run.

    Each start of rank 0 has folders of its own. A file of a complete checkpoint is therefore never
    overwritten, also if the same version is saved again after a restart.
    """

    node: int
    host: str  # Host name of the node.
    address: str  # Its address on the interface that reaches rank 0's node.
    folder: Path
    start: str  # Random per start of rank 0.

    @property
    def label(self) -> str:
        """The node as text."""
        return f"learner node {self.node} ({self.host})"

    def check(self) -> None:
        """Check that the folder can be written. Raises: LongstrideError: names the node."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.folder, os.O_TMPFILE | os.O_WRONLY))
        except OSError as error:
            raise LongstrideError(
                f"{self.label}: learner.shard_folder: {self.folder}: {error.strerror}"
            ) from error

    def write(self, path: Path, parts: Sequence[memoryview]) -> ShardFile:
        """Write and sync a file; return its entry of the manifest.

        Args:
            path: its place on rank 0's node in the default form: CHECKPOINT/state/NAME.

        Raises: ShardNotWritten: has the system's error number.
        """
        file = self.folder / f"{_version(path.parent)}-{self.start}" / path.name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            LOCAL.write(file, parts)
            sync_folder(file.parent)
            sync_folder(self.folder)
        except OSError as error:
            raise ShardNotWritten(error.errno, f"{self.label}: {error.strerror}: {file}") from error
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return ShardFile(
            name=file.name,
            node=self.node,
            host=self.host,
            address=self.address,
            path=str(file.absolute()),
            num_bytes=sum(map(len, parts)),
            sha256=digest.hexdigest(),
        )

    def candidates(self, file: ShardFile) -> list[Path]:
        """Return the places where this node may have a file of a manifest."""
        recorded = Path(file.path)
        return [recorded, self.folder / recorded.parent.name / file.name]

    def remove_old(self, tensors: Path, names: Callable[[str], list[str]]) -> None:
        """Remove the files of checkpoints that rank 0's node no longer has.

        Args:
            tensors: folder of tensors on rank 0's node of the checkpoint that is being written.
            names: returns the names of the files below a folder of rank 0's node, [] without it.
        """
        current = _version(tensors)
        root = tensors.parents[1]
        for checkpoint in self.folder.glob("step-*-*"):
            version = checkpoint.name.rpartition("-")[0]
            places = (f"{root}/{version}", f"{root}/{version}{ASIDE}")
            try:
                if version == current or any(names(place) for place in places):
                    continue
                shutil.rmtree(checkpoint)
            except (OSError, LongstrideError) as error:  # The next checkpoint tries again.
                logger.warning(
                    "cannot remove old shard files folder=%s error=%s", checkpoint, error
                )


def _version(tensors: Path) -> str:
    """Return the name of a checkpoint, such as step-000050, from its folder of tensors."""
    return tensors.parent.name.strip(".").removesuffix(".partial")
