"""Copies a run to a store, once or again and again, so that a restart elsewhere loses little."""

import logging
import math
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field

from common.errors import ConfigError, WireError
from common.host.lock import hold_role
from common.log import configure_logging
from common.store.disk import if_room
from common.store.run_dir import RunDir, json_object, write_json
from learner.journal.journal import JournalPosition, open_journal_file, synced_end
from tools.copies.capture import (
    JUDGES,
    CapturedFile,
    RunCapture,
    SourceChanged,
    add_judges,
    capture,
)
from tools.copies.manifest import (
    FOLDER,
    FORMAT,
    CopyManifest,
    StoredFile,
    StoredPart,
    decode,
    digest_of,
    split_text,
)
from tools.copies.store import OBJECTS, ObjectStore

logger = logging.getLogger(__name__)

PART_BYTES = 32 << 20  # Size of the parts of files that do not change.
GROWING_PART_BYTES = 4 << 20  # Size of the parts of other files. The last part is written anew.
KEPT_MANIFESTS = 2  # A reader of the previous copy can finish while the next one is written.
STATE_S = 5.0  # Seconds between two updates of the state file.
LOG_EVERY_S = 300.0  # Seconds between two log lines about a failing store.
MAX_PAUSE_S = 60.0  # Longest pause after a failed round.
MIN_SLICE_S = 1.0  # Least seconds for checkpoints in one copy.
NO_LIMIT_S = 1e9
JUDGES_EVERY_S = 600.0  # Seconds between two copies of the judges' answers, which are whole files.
NICENESS = 10  # The run has priority.
LAST_TRIES = 5  # Tries of the last round if files change.
STATE_FILE = "copies.json"
_CHECKPOINT = re.compile(r"checkpoints/step-(\d+)/")
_PACKED = re.compile(r"journal/(\d+)\.log\.gz")


@dataclass(slots=True, kw_only=True)
class CopyProgress:
    """The content of the state file. Displays and metrics read it."""

    id: str
    to: str
    copied_at: float  # Unix time of the newest whole copy, or of the start without one.
    num_copies: int = 0
    segment: int = 0  # Synced end of the journal in the copy.
    offset: int = 0
    lag_bytes: int = 0  # Acknowledged bytes of the journal after that end.
    checkpoint: int = -1  # Version of the newest checkpoint in the copy.
    failing_since: float = 0.0  # Unix time; 0: the store works.
    error: str = ""
    is_running: bool = True  # False after the last round.


class RunCopier:
    """Copies one run to `URL/NAME-ID`, from one thread.

    Example: copy_once() copies the journal, the logs and the scheduler's state. A new checkpoint is
    large: copy_once() spends at most `slice_s` on it and then writes the manifest without it. The
    next calls continue, and the first manifest after its last part contains it.

    A manifest is written after all its parts, and parts never change. So a kill at any time leaves
    the previous copy whole. Parts that no kept manifest needs are removed after the next manifest.
    """

    def __init__(
        self, run_dir: RunDir, url: str, *, slice_s: float, now: Callable[[], float] = time.time
    ) -> None:
        """Read the id of the run, and make no request. Raises: ConfigError: the URL is not usable.

        Args:
            slice_s: longest time for checkpoints in one copy.
        """
        self._run_dir = run_dir
        self._slice_s = slice_s
        self._now = now
        run_id = str(json_object(run_dir.root / STATE_FILE).get("id") or secrets.token_hex(4))
        if not re.fullmatch(r"[0-9a-f]{8}", run_id):
            raise ConfigError(f"{run_dir.root / STATE_FILE}: damaged, remove it; a new copy begins")
        to = f"{url.rstrip('/')}/{run_dir.root.name}-{run_id}"
        self.store = ObjectStore(to)
        self.state = CopyProgress(id=run_id, to=to, copied_at=now())
        self._known = _KnownParts()
        self._last: CopyManifest | None = None
        self._split: list[int] = []  # Checkpoints of the last copy with files on other nodes.
        self._is_opened = False
        self._judges_at = -math.inf  # Monotonic time of the last copy of the judges' answers.
        self._state_lock = threading.Lock()
        self.has_more = False  # A checkpoint is not copied completely.

    def copy_once(self, *, is_last: bool = False) -> CopyManifest:
        """Copy the current state of the run; return the new manifest.

        Args:
            is_last: whether all checkpoints must be in this copy, temporary ones included.

        Raises: OSError: the store failed, or no consistent state was found; SourceChanged.
        """
        self._open()
        with capture(self._run_dir, with_temporary=is_last) as cut:
            has_judges = is_last or time.monotonic() - self._judges_at >= JUDGES_EVERY_S
            if has_judges:
                add_judges(cut, self._run_dir)
            files = self._copy_files(cut, is_last=is_last)
            last = self._last
            if has_judges:
                self._judges_at = time.monotonic()
            elif last is not None:
                files |= {k: v for k, v in last.files.items() if k.startswith(f"{JUDGES}/")}
            manifest = CopyManifest(
                format=FORMAT,
                number=last.number + 1 if last else 1,
                run=self._run_dir.root.name,
                id=self.state.id,
                at=cut.at,
                journal=cut.journal,
                pruned_before=cut.pruned_before,
                files=files,
            )
            if last is not None and not _may_follow(last, manifest, cut):
                return last
        self.store.write_manifest(manifest)
        self._note(manifest)
        if (split := manifest.split_checkpoints) and split != self._split:
            logger.warning("the copy is not whole: %s", split_text(split))
        self._split = split
        self._forget_old()
        return manifest

    def _open(self) -> None:
        """Read the newest manifest and the stored parts, once."""
        if self._is_opened:
            return
        self.write_state()  # The next process of this run continues this copy.
        self._last = self.store.newest_manifest()
        self._known = _KnownParts(self.store.sizes(OBJECTS))
        if self._last is not None:
            self._note(self._last, num=0)
        self._is_opened = True

    def _copy_files(self, cut: RunCapture, *, is_last: bool) -> dict[str, StoredFile]:
        """Copy the files of a cut; return those that are stored completely."""
        files: dict[str, StoredFile] = {}
        checkpoints: dict[int, list[CapturedFile]] = {}
        for file in cut.files:
            match = _CHECKPOINT.match(file.name)
            if match:
                checkpoints.setdefault(int(match[1]), []).append(file)
            elif (plain := self._copied_plain(file.name)) is not None:
                files[plain] = self._known_file(plain)
            else:
                files[file.name] = self._copy(file)
        deadline = None if is_last else time.monotonic() + self._slice_s
        self.has_more = False
        for version, ours in sorted(checkpoints.items(), reverse=True):  # The newest first.
            try:
                stored = {file.name: self._copy(file, deadline=deadline) for file in ours}
            except SourceChanged:
                logger.info("checkpoint replaced during its copy version=%d", version)
                continue
            if all(sum(p.size for p in each.parts) == each.size for each in stored.values()):
                files |= stored
            else:
                self.has_more = True
        return self._with_kept_checkpoint(files)

    def _copied_plain(self, name: str) -> str | None:
        """Return the name of the uncompressed file that the copy has instead of this file."""
        match = _PACKED.fullmatch(name)
        plain = name.removesuffix(".gz")
        last = self._last
        if match is None or last is None or plain not in last.files:
            return None
        return plain if last.journal.file > int(match[1]) else None

    def _known_file(self, name: str) -> StoredFile:
        assert self._last is not None
        return self._last.files[name]

    def _with_kept_checkpoint(self, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        """Return the files with the last copy's newest checkpoint, if they have no newer one.

        The run has replaced that checkpoint, but its successor is not copied yet.
        """
        last = self._last
        newest = max((int(m[1]) for m in map(_CHECKPOINT.match, files) if m), default=-1)
        if last is None or newest >= last.checkpoint:
            return files
        folder = f"checkpoints/step-{last.checkpoint:06d}/"
        return files | {name: each for name, each in last.files.items() if name.startswith(folder)}

    def _copy(self, file: CapturedFile, *, deadline: float | None = None) -> StoredFile:
        """Store the parts of a file that the store lacks; return the file.

        After the deadline (monotonic) it begins no further parts, and the list of parts is shorter.
        """
        is_fixed = file.path is not None and not file.is_growing
        before = self._last.files.get(file.name) if self._last else None
        if is_fixed and before and (before.size, before.mtime_ns) == (file.size, file.mtime_ns):
            return before
        is_large = is_fixed and not file.name.startswith("journal/")
        part_bytes = PART_BYTES if is_large else GROWING_PART_BYTES
        starts = range(0, file.size, part_bytes)

        def copy_part(start: int) -> StoredPart | None:
            """Return a part, once it is stored; None after the deadline."""
            size = min(part_bytes, file.size - start)
            key = (file.name, file.inode, file.mtime_ns, start, size)
            stored = self._known.find(key)
            if stored is not None:
                return stored
            if deadline is not None and time.monotonic() > deadline:
                return None
            content = file.read(start, size)
            part = StoredPart(digest=digest_of(content), size=size)
            if not self._known.has(part):
                self.store.write_part(content)
            is_cached = file.path is not None and (is_fixed or size == part_bytes)
            self._known.add(part, key if is_cached else None)
            return part

        parts = self.store.each(copy_part, starts)
        done = parts[: parts.index(None)] if None in parts else parts
        return StoredFile(
            size=file.size,
            mtime_ns=file.mtime_ns if is_fixed else 0,
            parts=[part for part in done if part is not None],
        )

    def _note(self, manifest: CopyManifest, *, num: int = 1) -> None:
        """Record a whole copy."""
        self._last = manifest
        state = self.state
        state.copied_at = manifest.at
        state.num_copies += num
        state.segment = manifest.journal.file
        state.offset = manifest.journal.offset
        state.checkpoint = manifest.checkpoint

    def _forget_old(self) -> None:
        """Remove old manifests, then the parts that no kept manifest needs."""
        names = self.store.manifest_names()
        needed: set[str] = set()
        for name in names[:KEPT_MANIFESTS]:
            manifest = decode(name, self.store.read(f"{FOLDER}/{name}"))
            needed |= {digest for digest, _ in manifest.digests()} if manifest else set()
        self.store.remove(f"{FOLDER}/{name}" for name in names[KEPT_MANIFESTS:])
        if not self.has_more:  # The parts of an incomplete checkpoint are in no manifest yet.
            going = self._known.forget_all_but(needed)
            self.store.remove(f"{OBJECTS}/{digest}" for digest in going)

    # --- state file ---------------------------------------------------------------------------

    def note_failure(self, error: BaseException) -> None:
        """Record a failed round."""
        self.state.failing_since = self.state.failing_since or self._now()
        self.state.error = f"{error}"[:500]

    def note_success(self) -> None:
        """Record a round without a failure."""
        self.state.failing_since = 0.0
        self.state.error = ""

    def write_state(self) -> None:
        """Write the state file with the current lag. A full disk is ignored. Thread-safe."""
        end = JournalPosition(file=self.state.segment, offset=self.state.offset)
        path = self._run_dir.root / STATE_FILE
        with self._state_lock:
            try:
                self.state.lag_bytes = bytes_after(self._run_dir, end)
            except (FileNotFoundError, WireError) as error:
                logger.debug(
                    "lag not measured, a file of the journal was pruned or is damaged: %s", error
                )
            if_room(lambda: write_json(path, asdict(self.state)), path)


def _may_follow(last: CopyManifest, manifest: CopyManifest, cut: RunCapture) -> bool:
    """Return whether a manifest may replace the last one.

    A checkpoint that the run has removed needs records of the journal that may be pruned by now.
    The last copy then stays until a newer checkpoint is copied.
    """
    marker = f"checkpoints/step-{manifest.checkpoint:06d}/COMPLETE"
    has_checkpoint = any(file.name == marker for file in cut.files)
    return has_checkpoint or manifest.pruned_before == last.pruned_before or last.checkpoint < 0


@dataclass(slots=True)
class _KnownParts:
    """The stored parts, and the parts of local files that need not be read again."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])  # Digest -> stored size.
    by_key: dict[tuple[str, int, int, int, int], StoredPart] = field(
        default_factory=dict[tuple[str, int, int, int, int], StoredPart]
    )

    def has(self, part: StoredPart) -> bool:
        """Return whether a part is stored. A part of another size was written incompletely."""
        return self.sizes.get(part.digest) == part.size

    def find(self, key: tuple[str, int, int, int, int]) -> StoredPart | None:
        """Return the part of a local file if it is stored."""
        part = self.by_key.get(key)
        return part if part is not None and self.has(part) else None

    def add(self, part: StoredPart, key: tuple[str, int, int, int, int] | None) -> None:
        """Record a stored part, and its place in a local file that does not change there."""
        self.sizes[part.digest] = part.size
        if key is not None:
            self.by_key[key] = part

    def forget_all_but(self, needed: set[str]) -> list[str]:
        """Forget the other parts; return their digests."""
        going = [digest for digest in self.sizes if digest not in needed]
        for digest in going:
            del self.sizes[digest]
        self.by_key = {key: part for key, part in self.by_key.items() if part.digest in self.sizes}
        return going


def bytes_after(run_dir: RunDir, position: JournalPosition) -> int:
    """Return the number of acknowledged bytes of the journal after a position."""
    end = synced_end(run_dir.journal)
    total = 0
    for number in range(position.file, end.file + 1):
        journal_file = open_journal_file(run_dir.journal, number)
        if journal_file is None:
            continue  # The file was pruned.
        with journal_file:
            size = end.offset if number == end.file else journal_file.size
        total += max(0, size - (position.offset if number == position.file else 0))
    return total


def run_copier(copier: RunCopier, stop: threading.Event, *, every_s: float) -> int:
    """Copy every few seconds until `stop` is set, then once more; return the exit code.

    A failing store is logged and never ends the loop. The pause doubles with each failed round.
    """
    copier.write_state()
    watch = threading.Thread(target=_watch_lag, args=(copier, stop), daemon=True)
    watch.start()
    pause_s = every_s
    logged_at = 0.0
    while not stop.wait(0.0 if copier.has_more else pause_s):
        is_failing = bool(copier.state.failing_since)
        if _try(copier):
            pause_s = every_s
            if is_failing:
                logger.warning("the store works again to=%s", copier.state.to)
            continue
        pause_s = min(MAX_PAUSE_S, 2 * max(pause_s, 1.0))
        if not is_failing or time.monotonic() - logged_at > LOG_EVERY_S:
            logged_at = time.monotonic()
            _log_failure(copier, pause_s)
    is_copied = _try(copier, is_last=True)
    copier.state.is_running = False
    copier.write_state()
    if not is_copied:
        _log_failure(copier, None)
    logger.info("stopped copies=%d lag_bytes=%d", copier.state.num_copies, copier.state.lag_bytes)
    return 0 if is_copied else 1


def copy_all(copier: RunCopier) -> CopyManifest:
    """Copy the run with all its checkpoints; return the manifest. Raises: OSError."""
    reason = ""
    for _ in range(LAST_TRIES):
        try:
            return copier.copy_once(is_last=True)
        except SourceChanged as error:
            reason = f"{error}"
    raise OSError(f"a file changed during each of {LAST_TRIES} copies: {reason}")


def _try(copier: RunCopier, *, is_last: bool = False) -> bool:
    """Copy once; return whether the store works."""
    started = time.monotonic()
    try:
        manifest = copy_all(copier) if is_last else copier.copy_once()
    except SourceChanged as error:
        logger.info("a file changed during its copy, the next round copies it file=%s", error)
        copier.has_more = False
        return True
    except OSError as error:
        copier.has_more = False
        copier.note_failure(error)
        copier.write_state()
        return False
    copier.note_success()
    took_s = time.monotonic() - started
    logger.info(
        "copied number=%d files=%d mb=%.1f checkpoint=%d took_s=%.2f",
        manifest.number,
        len(manifest.files),
        manifest.num_bytes / 1e6,
        manifest.checkpoint,
        took_s,
    )
    return True


def _log_failure(copier: RunCopier, next_s: float | None) -> None:
    """Log the failure of the store, and what the copy lacks."""
    state = copier.state
    logger.error(
        "the copy failed, the run continues to=%s error=%s lag_bytes=%d copy_age_s=%.0f next_in=%s",
        state.to,
        state.error,
        state.lag_bytes,
        time.time() - state.copied_at,
        "never" if next_s is None else f"{next_s:g}s",
    )


def _watch_lag(copier: RunCopier, stop: threading.Event) -> None:
    """Update the state file, also while a request to the store hangs."""
    while not stop.wait(STATE_S):
        copier.write_state()


def copy(run_dir: RunDir, options: Mapping[str, str]) -> int:
    """Copy a run once, or every `every_s` seconds until SIGTERM; return the exit code.

    Raises: ConfigError: an option is missing or wrong, or another process copies this run.
    """
    if "to" not in options:
        raise ConfigError("copy needs to=FOLDER or to=URL, such as to=s3://bucket/runs")
    every_s = _seconds(options.get("every_s", "0"))
    with hold_role(run_dir.root, "copies"):
        slice_s = max(MIN_SLICE_S, every_s) if every_s else NO_LIMIT_S
        copier = RunCopier(run_dir, options["to"], slice_s=slice_s)
        with closing(copier.store):
            if every_s:
                return _copy_until_stopped(copier, every_s)
            try:
                manifest = copy_all(copier)
            except OSError as error:
                print(f"error: {run_dir.root} was not copied: {error}")
                return 1
            copier.state.is_running = False
            copier.write_state()
    size = f"{len(manifest.files)} files, {manifest.num_bytes / 1e6:.1f} MB"
    print(f"copied {run_dir.root} to {copier.state.to}: {size}")
    if manifest.split_checkpoints:
        print(f"the copy is not whole: {split_text(manifest.split_checkpoints)}")
    return 0


def _copy_until_stopped(copier: RunCopier, every_s: float) -> int:
    """Copy every few seconds until a signal, at low priority."""
    configure_logging("copies", "INFO")
    os.nice(NICENESS)
    stop = threading.Event()

    def on_signal(*_: object) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return run_copier(copier, stop, every_s=every_s)


def _seconds(text: str) -> float:
    """Return the value of `every_s`. Raises: ConfigError: it is no number, or too small."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value != 0 and not 0.1 <= value <= 86_400:
        raise ConfigError(f"every_s={text}: must be 0 or in [0.1, 86400]")
    return value
