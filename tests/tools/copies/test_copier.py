"""Laws of the copies of a run: whole or ignored, complete, and never in the way of the run."""

import shutil
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry, register_implementation

from common.store.run_dir import RunDir, write_json
from envhub.envs.dataset.judges.judge import Answer, JudgeStore
from learner.journal.journal import JournalWriter, journal_files, read_journal, synced_end
from learner.journal.metrics import copy_metrics, copy_state
from learner.journal.upkeep import pack, prune
from tests.tools.copies.runs import (
    DyingStore,
    Killed,
    add_checkpoint,
    copier_of,
    digests,
    make_copied_run,
)
from tests.tools.dashboard.runs import append, episode
from tools.copies.capture import MAX_WINDOW_S, SourceChanged, capture
from tools.copies.copier import RunCopier, copy_all, run_copier
from tools.copies.fetch import fetch
from tools.copies.manifest import FOLDER, CopyManifest, decode
from tools.copies.store import OBJECTS

NOT_COPIED = {"keys/hub_token", "journal/lock", "copies.json", "config.yaml", "status.json"}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_copied_run(tmp_path / "runs" / "a")


@pytest.fixture
def memory() -> Generator[str]:
    """A store in the memory of this process, empty before and after."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    register_implementation("dying", DyingStore, clobber=True)
    DyingStore.writes_left = 10**9
    yield "memory://copies"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    _registry.pop("dying")


def fetched(url: str, tmp_path: Path, name: str = "b") -> RunDir:
    """Return the restored run."""
    return RunDir(root=fetch(url, tmp_path / "elsewhere", name=name))


def ids(run_dir: RunDir) -> list[str]:
    return [trajectory.episode_id for _, trajectory in read_journal(run_dir.journal)]


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_restored_run_equals_the_original(
    run_dir: RunDir, tmp_path: Path, memory: str, kind: str
) -> None:
    place = {"path": f"{tmp_path}/copies", "file": f"file://{tmp_path}/copies", "memory": memory}
    copy_all(copier_of(run_dir, place[kind]))
    found = digests(fetched(place[kind], tmp_path).root)
    expected = {k: v for k, v in digests(run_dir.root).items() if k not in NOT_COPIED}
    assert "checkpoints/step-000010/state/0.distcp" in expected
    assert found.pop("config.yaml")
    assert found == expected


def test_copy_contains_no_secret(run_dir: RunDir, tmp_path: Path) -> None:
    text = run_dir.config.read_text(encoding="utf-8")
    run_dir.config.write_text(text + "env: {url: 'http://me:pw@host/x'}\n", encoding="utf-8")
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))
    stored = b"".join(p.read_bytes() for p in (tmp_path / "copies").rglob("*") if p.is_file())
    assert b"swordfish" not in stored
    assert b"me:pw" not in stored
    assert "url: http://host/x" in fetched(f"{tmp_path}/copies", tmp_path).config.read_text(
        encoding="utf-8"
    )


def test_copy_killed_in_a_write_leaves_the_previous_copy_whole(
    run_dir: RunDir, tmp_path: Path, memory: str
) -> None:
    copy_all(copier_of(run_dir, "dying://copies"))
    before = ids(run_dir)
    stored = dict(MemoryFileSystem.store)
    append(run_dir, episode(8), episode(9))
    add_checkpoint(run_dir, 20)
    # New are a file, the synced mark, three files of the checkpoint and the manifest.
    for num_writes in range(6):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(stored)
        DyingStore.writes_left = num_writes
        with pytest.raises(Killed):
            copy_all(copier_of(run_dir, "dying://copies"))
        restored = fetched("memory://copies", tmp_path, f"b{num_writes}")
        assert ids(restored) == before
        assert [p.name for p in restored.checkpoints.iterdir()] == ["step-000010"]
        DyingStore.writes_left = 10**9
        copy_all(copier_of(run_dir, "dying://copies"))  # It continues after the kill.
        restored = fetched("memory://copies", tmp_path, f"c{num_writes}")
        assert ids(restored) == ids(run_dir)
        assert digests(restored.checkpoints) == digests(run_dir.checkpoints)


def test_journal_loses_only_the_uncopied_tail(run_dir: RunDir, tmp_path: Path) -> None:
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copy_all(copier)
    before = synced_end(run_dir.journal)
    append(run_dir, episode(8), episode(9), episode(10))
    copier.write_state()
    lag = synced_end(run_dir.journal).offset - before.offset
    state = copy_state(run_dir)
    assert state is not None
    assert lag > 0
    assert state.lag_bytes == lag
    assert copy_metrics(run_dir)["copy/lag_bytes"] == lag
    assert ids(fetched(f"{tmp_path}/copies", tmp_path)) == [
        f"g{i // 4:07d}/{i % 4}" for i in range(8)
    ]


def test_lag_counts_the_bytes_of_all_later_files(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    writer = JournalWriter(run_dir.journal, max_file_bytes=1)
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copier.copy_once()
    total = 0
    for number in range(3):
        start = writer.append(episode(number)).offset
        assert start == 0  # Each file has one record.
        total += writer.position.offset
    writer.close()
    copier.write_state()
    assert copier.state.lag_bytes == total
    copier.copy_once()
    copier.write_state()
    assert copier.state.lag_bytes == 0


def test_unsynced_tail_of_the_journal_is_not_copied(run_dir: RunDir, tmp_path: Path) -> None:
    writer = JournalWriter(run_dir.journal)
    writer.append(episode(8))
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))
    writer.close()
    assert len(ids(run_dir)) == 9
    assert len(ids(fetched(f"{tmp_path}/copies", tmp_path))) == 8


def test_next_copy_stores_only_new_parts(run_dir: RunDir, tmp_path: Path) -> None:
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copy_all(copier)
    objects = tmp_path / "copies" / copier.state.to.rpartition("/")[2] / OBJECTS
    before = {path.name: path.stat().st_mtime_ns for path in objects.iterdir()}
    append(run_dir, episode(8))
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))  # Another process of the same run.
    after = {path.name: path.stat().st_mtime_ns for path in objects.iterdir()}
    assert {name for name in after if after[name] != before.get(name)} == after.keys() - before
    assert len(after.keys() - before) == 2  # The file's last part, and the file `synced`.


def test_compressed_file_is_not_copied_again(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    writer = JournalWriter(run_dir.journal, max_file_bytes=1)
    for number in range(3):
        writer.append(episode(number))
    writer.close()
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    first = copier.copy_once()
    pack(run_dir.journal, 0)
    second = copier.copy_once()
    assert second.files["journal/000000.log"] == first.files["journal/000000.log"]
    assert "journal/000000.log.gz" not in second.files
    assert len(ids(fetched(f"{tmp_path}/copies", tmp_path))) == 3


def test_copy_follows_the_retention_of_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    writer = JournalWriter(run_dir.journal, max_file_bytes=1)
    for number in range(3):
        writer.append(episode(number))
    writer.close()
    add_checkpoint(run_dir, 10)
    add_checkpoint(run_dir, 20)
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    copier.copy_once()
    prune(run_dir.journal, before=2, may_remove=lambda *_: True)
    shutil.rmtree(run_dir.checkpoints / "step-000010")
    for number in (3, 4):  # The copy before the last one is removed, with its parts.
        append(run_dir, episode(number))
        copier.copy_once()
    restored = fetched(f"{tmp_path}/copies", tmp_path)
    assert [*journal_files(restored.journal)] == [*journal_files(run_dir.journal)]
    assert [path.name for path in restored.checkpoints.iterdir()] == ["step-000020"]
    assert ids(restored) == ids(run_dir)
    assert copier.store.sizes(OBJECTS).keys() == {
        digest
        for name in copier.store.manifest_names()
        for digest, _ in _decoded(copier, name).digests()
    }


def _decoded(copier: RunCopier, name: str) -> CopyManifest:
    manifest = decode(name, copier.store.read(f"{FOLDER}/{name}"))
    assert manifest is not None
    return manifest


def test_checkpoint_is_copied_over_several_copies(run_dir: RunDir, tmp_path: Path) -> None:
    copier = copier_of(run_dir, f"{tmp_path}/copies", slice_s=-1.0)  # It is over at once.
    append(run_dir, episode(8))
    assert copier.copy_once().checkpoint == -1
    assert copier.has_more
    assert len(ids(fetched(f"{tmp_path}/copies", tmp_path))) == 9
    assert copier.copy_once(is_last=True).checkpoint == 10
    assert not copier.has_more


def test_old_checkpoint_stays_until_its_successor_is_copied(
    run_dir: RunDir, tmp_path: Path
) -> None:
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))
    shutil.rmtree(run_dir.checkpoints / "step-000010")
    add_checkpoint(run_dir, 20)
    append(run_dir, episode(8))
    slow = copier_of(run_dir, f"{tmp_path}/copies", slice_s=-1.0)
    slow.copy_once()
    restored = fetched(f"{tmp_path}/copies", tmp_path)
    assert [path.name for path in restored.checkpoints.iterdir()] == ["step-000010"]
    assert len(ids(restored)) == 9
    slow.copy_once(is_last=True)
    restored = fetched(f"{tmp_path}/copies", tmp_path, "c")
    assert [path.name for path in restored.checkpoints.iterdir()] == ["step-000020"]


def test_copy_waits_if_its_checkpoint_needs_pruned_records(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "a")
    writer = JournalWriter(run_dir.journal, max_file_bytes=1)
    for number in range(3):
        writer.append(episode(number))
    writer.close()
    old = add_checkpoint(run_dir, 10)
    copier = copier_of(run_dir, f"{tmp_path}/copies", slice_s=-1.0)
    first = copier.copy_once(is_last=True)
    prune(run_dir.journal, before=1, may_remove=lambda *_: True)
    shutil.rmtree(old)
    add_checkpoint(run_dir, 20)
    assert copier.copy_once() == first
    assert copier.copy_once(is_last=True).checkpoint == 20


def test_temporary_checkpoint_is_copied_only_at_the_end(run_dir: RunDir, tmp_path: Path) -> None:
    add_checkpoint(run_dir, 12, is_temporary=True)
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    assert copier.copy_once().checkpoint == 10
    assert copier.copy_once(is_last=True).checkpoint == 12


def test_cut_reads_the_journal_after_the_scheduler(run_dir: RunDir) -> None:
    times: list[float] = []

    def now() -> float:
        """Let an episode arrive, and the scheduler save a state, while the files are read."""
        times.append(0.0)
        if len(times) == 1:
            append(run_dir, episode(8))
        else:
            (run_dir.root / "scheduler.json").write_text('{"log": 4}', encoding="utf-8")
        return 0.0

    with capture(run_dir, now=now) as found:
        contents = {file.name: file.content for file in found.files}
        assert found.journal == synced_end(run_dir.journal)
    assert (contents["scheduler.json"] or b"").startswith(b'{"log": 3')
    assert contents["scheduler.3.log"] == b"events"


def test_slow_cut_is_repeated(run_dir: RunDir) -> None:
    times = iter([0.0, 2 * MAX_WINDOW_S, 1.0, 1.0 + MAX_WINDOW_S / 2])
    with capture(run_dir, now=lambda: next(times)):
        pass
    assert next(times, None) is None


def test_cut_without_its_log_of_events_is_refused(run_dir: RunDir) -> None:
    (run_dir.root / "scheduler.3.log").unlink()
    with pytest.raises(OSError, match=r"scheduler\.3\.log was replaced or is missing"):
        capture(run_dir)


@pytest.mark.slow
def test_failing_store_is_named_and_copied_to_later(run_dir: RunDir, tmp_path: Path) -> None:
    blocked = tmp_path / "copies"
    blocked.write_text("a file where the folder would be", encoding="utf-8")
    copier = copier_of(run_dir, f"{blocked}")
    stop = threading.Event()
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(run_copier(copier, stop, every_s=0.1)), daemon=True
    )
    thread.start()
    wait_until(lambda: (copy_metrics(run_dir).get("copy/failing_s") or 0.0) > 0)
    state = copy_state(run_dir, now=time.time() + 100)
    assert state is not None
    assert min(state.failing_s, state.age_s) >= 100
    assert "NotADirectory" in copier.state.error
    blocked.unlink()
    wait_until(lambda: copier.state.num_copies > 0 and not copier.state.error)
    stop.set()
    thread.join(60)
    assert codes == [0]
    assert copy_state(run_dir) is None  # Nothing is late after the end.
    assert ids(fetched(f"{blocked}", tmp_path)) == ids(run_dir)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_runs_of_one_name_have_copies_of_their_own(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        run_dir = make_copied_run(tmp_path / folder / "a", num=4)
        copier = copier_of(run_dir, f"{tmp_path}/copies")
        copy_all(copier)
        copier.write_state()
    assert len([*(tmp_path / "copies").iterdir()]) == 2


def test_next_process_of_a_run_continues_its_copy(run_dir: RunDir, tmp_path: Path) -> None:
    first = copier_of(run_dir, f"{tmp_path}/copies")
    first.write_state()
    assert copier_of(run_dir, f"{tmp_path}/copies").state.to == first.state.to
    write_json(run_dir.root / "copies.json", {"id": "../../x"})
    with pytest.raises(ValueError, match=r"copies\.json: damaged"):
        copier_of(run_dir, f"{tmp_path}/copies")


def test_file_replaced_after_the_cut_is_not_mixed(run_dir: RunDir) -> None:
    steps = run_dir.steps.read_bytes()
    model = run_dir.checkpoints / "step-000010" / "model.safetensors"
    size = model.stat().st_size
    with capture(run_dir) as found:
        files = {file.name: file for file in found.files}
        write_json(run_dir.steps, "shorter")
        write_json(model, "x" * (size - 3))  # Of the same size.
        assert model.stat().st_size == size
        assert files["journal/steps.jsonl"].read(0, len(steps)) == steps
        with pytest.raises(SourceChanged):
            files["checkpoints/step-000010/model.safetensors"].read(0, size)
    copier = copier_of(run_dir, f"{run_dir.root.parent}/copies")
    assert copier.copy_once().checkpoint == 10


def test_copy_has_the_rewards_of_groups_that_a_restart_uses(run_dir: RunDir) -> None:
    line = b'{"group":"g0000001","rewards":{"0":1.0},"scale":1,"shift":0,"values":{}}\n'
    run_dir.group_rewards.write_bytes(line)
    with capture(run_dir) as found:
        (file,) = (file for file in found.files if file.name == "journal/group_rewards.jsonl")
        run_dir.group_rewards.unlink()  # As after a pruning.
        assert file.read(0, len(line)) == line


def test_copy_has_the_judges_answers_and_totals(run_dir: RunDir, tmp_path: Path) -> None:
    path = run_dir.root / "judges" / "taste.sqlite"
    store = JudgeStore(path)
    for number in range(200):
        store.keep(f"key {number}", Answer(text=f"Score: {number}"))
    store.add("calls", 200)
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))  # The newest answers are in the log only.
    copied = JudgeStore(fetched(f"{tmp_path}/copies", tmp_path).root / "judges" / "taste.sqlite")
    assert (copied.find("key 199"), copied.total("calls")) == (Answer(text="Score: 199"), 200)
    copied.close()
    store.close()


def test_later_copies_keep_the_judges_answers(run_dir: RunDir, tmp_path: Path) -> None:
    store = JudgeStore(run_dir.root / "judges" / "taste.sqlite")
    store.add("calls", 1)
    copier = copier_of(run_dir, f"{tmp_path}/copies")
    first = copier.copy_once()
    store.add("calls", 1)
    append(run_dir, episode(8))
    later = copier.copy_once()  # Too early for another copy of the whole file.
    name = "judges/taste.sqlite"
    assert (later.number, later.files[name]) == (2, first.files[name])
    last = copier.copy_once(is_last=True)
    assert last.files[name] != first.files[name]
    store.close()


def test_damaged_answers_of_judges_are_named(run_dir: RunDir, tmp_path: Path) -> None:
    path = run_dir.root / "judges" / "taste.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(OSError, match=r"judges/taste\.sqlite: file is not a database"):
        copy_all(copier_of(run_dir, f"{tmp_path}/copies"))


def test_copy_has_the_trackers_runs(run_dir: RunDir, tmp_path: Path) -> None:
    names = ["wandb_id", "wandb_id-eval", "mlflow_id", "trackio_id", "tensorboard/events.out.1"]
    (run_dir.root / "tensorboard").mkdir()
    for name in names:
        (run_dir.root / name).write_text(f"run of {name}", encoding="utf-8")
    copy_all(copier_of(run_dir, f"{tmp_path}/copies"))
    restored = fetched(f"{tmp_path}/copies", tmp_path).root
    assert [(restored / name).read_text(encoding="utf-8") for name in names] == [
        f"run of {name}" for name in names
    ]
