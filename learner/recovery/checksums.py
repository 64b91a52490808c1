"""The file `checksums.jsonl` of a run, with which its training can be recomputed and verified.

Each start of the learner writes one line with everything that determines its computation. A line
per batch follows, whether the batch was trained on or skipped. If a later start computes the same
batch again, its line replaces the earlier one.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from common.config.load import sections_as_yaml
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import cpu_units
from common.store.disk import AppendFile, with_room
from common.store.run_dir import RunDir, cut_head
from common.user_code import changed_functions, digests_of, load_function
from learner.algorithms.user_functions import functions_of
from learner.ingest.group_rewards import group_reward_digests
from learner.policy.model import pick_device
from learner.recovery.step_log import LoggedStep, whole_bytes
from learner.trackers import user_trackers
from learner.training.digests import StepDigests, first_difference
from learner.training.trainer import Trainer

_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
_WORDS = {"cpu": "CPU", "units": "vector units", "capability": "kernels", "torch": "torch"}


def machine_facts(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Return the properties of this machine that affect rounding, as values for JSON."""
    lines = (
        cpuinfo.read_text(errors="replace", encoding="utf-8").splitlines()
        if cpuinfo.exists()
        else []
    )
    named = (line for line in lines if line.startswith("model name"))
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "cpu": next(named, "").partition(":")[2].strip(),
        "units": " ".join(cpu_units()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
    } | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each property that differs between two machines."""
    return [
        f"{_WORDS.get(name, name)}: was {was.get(name, 'not set')}, is {now.get(name, 'not set')}"
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
    ]


logger = logging.getLogger(__name__)

Key = tuple[int, int]  # Version and batch number, as in the step log.


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The settings and weights with which one start of the learner computes."""

    version: int  # Version of the initial weights.
    number: int  # Number of batches before this start.
    weights: str  # Checksum of the trained weights.
    frozen: str  # Checksum of the frozen weights: the base of adapters and the reference policy.
    code: str  # Revision of the code.
    machine: dict[str, Any]
    # All settings of the trainer, with automatic choices resolved.
    settings: dict[str, dict[str, Any]]
    # Digests of the files of the user's functions, by the key that names the function.
    functions: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChecksums:
    """The record of one batch."""

    digests: StepDigests
    start: int  # Index of the start that computed it, from 0.
    cpu_s: float  # CPU-seconds of rank 0's process since it began.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChecksumRecord:
    """The content of a whole file."""

    starts: list[Start] = field(default_factory=list[Start])
    lines: dict[Key, BatchChecksums] = field(default_factory=dict[Key, BatchChecksums])

    def learner_cpu_s(self) -> float:
        """Return the CPU-seconds of all starts, each up to its last batch."""
        last = {line.start: line.cpu_s for line in self.lines.values()}
        return sum(last.values())


def settings_of(cfg: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the settings that determine the computation of a trainer, as values for JSON."""
    sections = yaml.safe_load(sections_as_yaml(cfg, ("algorithm", "learner"), without={}))
    return sections | {
        "run": {"seed": cfg.run.seed},
        "train": {"num_steps": cfg.train.num_steps},
        "model": {"path": cfg.model.path, "dtype": cfg.model.dtype},
        "actor": {"temperature": cfg.actor.temperature},
        "scheduler": {"max_ahead_steps": cfg.scheduler.max_ahead_steps},
    }


def start_of(cfg: RunConfig, run_dir: RunDir, trainer: Trainer, *, version: int) -> Start:
    """Return the record of a learner's start. All automatic settings in `cfg` must be resolved."""
    weights, frozen = trainer.checksums()
    return Start(
        version=version,
        number=trainer.num_batches,
        weights=weights,
        frozen=frozen,
        code=code_of(run_dir),
        machine=machine_facts(pick_device(cfg.learner.device)),
        settings=settings_of(cfg),
        functions=_functions_of_learner(cfg),
    )


def _functions_of_learner(cfg: RunConfig) -> dict[str, str]:
    """Return the digests of the files of all functions of the user in the learner."""
    filters = [load_function("groups.filter", cfg.groups.filter)] if cfg.groups.filter else []
    functions = [*functions_of(cfg.algorithm), *filters, *user_trackers(cfg.log)]
    return digests_of(functions) | group_reward_digests(cfg.groups)


def code_of(run_dir: RunDir) -> str:
    """Return the code's revision from the first line of the run's configuration, or ""."""
    if not run_dir.config.is_file():
        return ""
    with run_dir.config.open(encoding="utf-8") as file:
        head = file.readline()
    return head.partition("# code: git ")[2].strip()


class ChecksumLog:
    """Writes the file without fsync. Lines lost in a power cut are recomputed by the next start."""

    def __init__(self, path: Path, *, version: int) -> None:
        """Open the file for appending and remove a torn last line.

        Args:
            version: of the initial weights. Later batches are repeated and compared with the file.
        """
        self._file = AppendFile(path)
        self._file.truncate(whole_bytes(path))
        # The start that the next `log` writes; None once it is written.
        self._start: Start | None = None
        self.last_start: Start | None = None  # The record whose settings are in use.
        self._known: dict[Key, StepDigests] = {}
        self._functions: dict[str, str] = {}  # Those of the start before this one.
        for record in _read(path, on_damage=lambda text: logger.warning("%s", text)):
            if isinstance(record, Start):
                self._functions = record.functions
            elif record[0][0] >= version:
                self._known[record[0]] = record[1]

    def begin(self, start: Start) -> None:
        """Record a start of the learner. It is written together with its first batch."""
        self._start = self.last_start = start
        for line in changed_functions(self._functions, start.functions):
            logger.warning("%s. Later steps, and repeated ones, use the new function.", line)

    def log(
        self,
        step: LoggedStep,
        digests: StepDigests,
        *,
        is_repeated: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Record a batch that is in the step log.

        A repeated batch that is equal is not written again.

        Args:
            check: as in `StepLog.append`.
        """
        expected = self._known.pop((step.version, step.number), None)
        if expected == digests:
            return
        if expected is not None and is_repeated:
            names = [name for ids in step.groups for name in ids]
            what = first_difference(expected, digests, names)
            logger.warning(
                "repeated step=%d differs from its first computation: %s", step.version, what
            )
        line = {"version": step.version, "number": step.number, "digests": asdict(digests)}
        lines = [line | {"cpu_s": round(time.process_time(), 2)}]
        if self._start is not None:
            start = asdict(self._start)
            if not self._start.functions:
                del start["functions"]  # Older versions read the line, too.
            lines.insert(0, {"start": start})
        texts = [json.dumps(each, separators=(",", ":")).encode() + b"\n" for each in lines]
        with_room(lambda: self._file.append(texts), self._file.path, check=check)
        self._start = None

    def prune(self, number: int) -> None:
        """Remove the lines of batches up to a number, and starts that have no batches left.

        Raises: OSError: the file could not be rewritten; it is unchanged.
        """
        path = self._file.path
        offset = 0
        start = b""
        has_gone = False
        with path.open("rb") as handle:
            for line in handle:
                plain = json.loads(line)
                if "start" not in plain and plain["number"] > number:
                    break
                has_gone = has_gone or "start" not in plain
                start = line if "start" in plain else start
                offset += len(line)
        if has_gone:
            cut_head(path, offset, head=start)
            self._file.close()
            self._file = AppendFile(path)

    def close(self) -> None:
        self._file.close()


def read_checksums(path: Path) -> ChecksumRecord:
    """Return the records of a run so far, also while it runs; an empty record without a file.

    Raises: ConfigError: a line is damaged; names file and line.
    """
    record = ChecksumRecord()

    def refuse(text: str) -> None:
        raise ConfigError(f"{text}; restore it from a backup")

    for entry in _read(path, on_damage=refuse):
        if isinstance(entry, Start):
            record.starts.append(entry)
        else:
            key, digests, cpu_s = entry
            start = len(record.starts) - 1
            record.lines[key] = BatchChecksums(digests=digests, start=start, cpu_s=cpu_s)
    return record


def _read(
    path: Path, *, on_damage: Callable[[str], object]
) -> Iterator[Start | tuple[Key, StepDigests, float]]:
    """Yield the record of each complete line, a start or a batch."""
    if not path.exists():
        return
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.endswith(b"\n"):
                return  # The line is still being written, or a crash has cut it off.
            try:
                plain: dict[str, Any] = json.loads(line)
                if "start" in plain:
                    yield Start(**plain["start"])
                else:
                    key = (int(plain["version"]), int(plain["number"]))
                    yield key, StepDigests(**plain["digests"]), float(plain["cpu_s"])
            except (ValueError, TypeError, KeyError) as error:
                on_damage(f"{path}: line {number} is damaged ({error!r})")
