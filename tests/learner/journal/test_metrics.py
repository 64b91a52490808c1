"""Laws of the metrics file."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from common.store.run_dir import RunDir
from learner.journal import metrics
from learner.journal.metrics import MetricsWriter, read_metrics, tail_metrics


class ListSink:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


def write(root: Path, steps: range, **options: int) -> None:
    writer = MetricsWriter(RunDir(root=root), [], **options)
    for step in steps:
        writer.log(step, {"reward/mean": step / 10})
    writer.close()


def steps(path: Path) -> list[object]:
    return [line["step"] for line in read_metrics(path)]


def test_metrics_file_gets_one_line_per_step(tmp_path: Path) -> None:
    sink = ListSink()
    writer = MetricsWriter(RunDir(root=tmp_path), [sink])
    writer.log(1, {"reward/mean": 0.5})
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["step"] == 1
    assert line["reward/mean"] == 0.5
    assert 0 <= (line["time_s"] or 0.0) < 60
    writer.close()
    assert sink.seen == [(1, {"reward/mean": 0.5})]
    assert sink.is_closed


def test_non_finite_metric_is_written_as_null(tmp_path: Path) -> None:
    sink = ListSink()
    writer = MetricsWriter(RunDir(root=tmp_path), [sink])
    writer.log(1, {"a/x": float("nan"), "a/y": float("-inf"), "a/z": 2})
    writer.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["a/x"], line["a/y"], line["a/z"]) == (None, None, 2.0)
    assert sink.seen == [(1, {"a/z": 2.0})]


def test_metrics_refuses_a_non_increasing_step(tmp_path: Path) -> None:
    writer = MetricsWriter(RunDir(root=tmp_path), [])
    writer.log(0, {})
    with pytest.raises(ValueError, match="step 0 logged after step 0"):
        writer.log(0, {})
    writer.close()


def test_resume_moves_later_metrics_aside(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    write(tmp_path, range(6, 9), resumed_at_step=5)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps(tmp_path / "metrics.discarded.jsonl") == [6, 7]


def test_metrics_begins_anew_when_not_resumed(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    write(tmp_path, range(2))
    assert steps(tmp_path / "metrics.jsonl") == [0, 1]
    assert steps(tmp_path / "metrics.discarded.jsonl") == [0, 1, 2]


def test_metrics_time_continues_after_a_resume(tmp_path: Path) -> None:
    lines = [{"step": step, "time_s": 100.0 * step} for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    write(tmp_path, range(2, 3), resumed_at_step=1)
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["step"] == 2
    assert 300 <= (last["time_s"] or 0.0) < 360


def test_resume_sets_a_torn_metrics_line_aside(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    with path.open("a", encoding="utf-8") as handle:
        handle.write('{"step": 3, "rew')
    assert steps(path) == [1, 2]
    write(tmp_path, range(3, 4), resumed_at_step=2)
    assert steps(path) == [1, 2, 3]
    assert (tmp_path / "metrics.discarded.jsonl").read_text(
        encoding="utf-8"
    ) == '{"step": 3, "rew\n'


def test_damaged_metrics_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_metrics_tail_returns_the_newest_steps(tmp_path: Path) -> None:
    write(tmp_path, range(1, 101))
    path = tmp_path / "metrics.jsonl"
    assert [line["step"] for line in tail_metrics(path, num_steps=2)] == [99, 100]
    few = tail_metrics(path, num_steps=100, tail_bytes=200)
    assert few[-1]["step"] == 100
    assert 0 < len(few) < 10
    assert tail_metrics(tmp_path / "none", num_steps=1) == []


def test_long_metrics_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BYTES", 4_000)
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(500))
    assert path.stat().st_size <= 4_000
    left = [int(str(step)) for step in steps(path)]
    assert left[0] == 0
    assert left[-20:] == list(range(480, 500))
    gaps = [b - a for a, b in itertools.pairwise(left)]
    assert gaps == sorted(gaps, reverse=True)  # the older, the sparser
    for begin in range(490, 700, 5):  # lives that die every five steps, and repeat them
        write(tmp_path, range(begin, begin + 10), resumed_at_step=begin - 1)
    assert steps(path)[-3:] == [702, 703, 704]
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 9_500
