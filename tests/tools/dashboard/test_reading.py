"""Laws of reading a run beside its writers."""

import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from actor.rollout.episode import action_number
from common.config.actor import AgentFormat
from common.errors import ConfigError, WireError
from common.formats.scripted import chars_of
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished
from common.wire.codec import pack_record
from common.wire.messages import EpisodeKind, PolicyKind
from learner.journal.index import FLOATS, INTS, NAMES, EpisodeRows
from learner.journal.journal import MAGIC
from learner.journal.texts import TokenTexts
from learner.journal.upkeep import pack
from learner.views import samples
from tests.marks import long_for
from tests.tools.dashboard.runs import TOKENIZER, append, episode, make_run
from tools.dashboard.reading.index_cache import MIN_ROWS
from tools.dashboard.reading.rows import find, page
from tools.dashboard.reading.run_source import RunSource, _action_of, group_advantages
from tools.dashboard.reading.sources import ConversationFile, Sources, find_run, open_source
from tools.dashboard.web.views import compare, overview

NUM_MANY = 100_000


def read(root: Path, *, cache: Path | None = None) -> RunSource:
    source = RunSource(root, name=root.name, cache=cache)
    while source.refresh(budget_s=5.0):
        pass
    return source


def names(source: RunSource, **wanted: str) -> list[str]:
    return [row["id"] for row in source.page(wanted, start=0, num=1000)["rows"]]


def test_growing_run_is_read_incrementally(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 4)
    source = read(run_dir.root)
    assert source.rows.num == 4
    append(run_dir, episode(4), episode(5))
    source.refresh()
    assert source.rows.ids == [f"g{i // 4:07d}/{i % 4}" for i in range(6)]
    assert names(source, outcome="filtered") == ["g0000001/1", "g0000001/0"]  # noted before


def test_starting_run_is_shown_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a" / "journal").mkdir(parents=True)
    source = read(tmp_path / "a")
    assert (source.rows.num, source.problems(), source.state()) == (0, [], "stopped")
    assert source.summary()["episodes"] == 0
    assert source.verdict().bound == "unknown"


def test_filter_selects_episodes_by_their_outcome(tmp_path: Path) -> None:
    source = read(make_run(tmp_path / "a").root)
    assert sorted(names(source, outcome="trained")) == [f"g0000000/{i}" for i in range(4)]
    assert sorted(names(source, outcome="filtered", cause="zero_variance", success="1")) == [
        "g0000001/2"
    ]
    assert names(source, group="g0000002", sort="oldest", max_reward="0.5") == [
        "g0000002/0",
        "g0000002/2",
        "g0000002/3",
    ]
    assert names(source, text="open-train-5") == ["g0000005/0"]
    assert names(source, horizon="20", env="maze", min_reward="1")[-1] == "g0000006/0"
    found = source.page({"outcome": "failed"}, start=0, num=10)
    assert found["absent"] == [{"id": "g0000099/0", "outcome": "failed", "cause": "lease_expired"}]
    assert source.page({}, start=0, num=1)["facets"]["outcome"]["in_flight"] == 32


@pytest.mark.parametrize("wanted", [{"colour": "red"}, {"min_reward": "x"}, {"sort": "y"}])
def test_invalid_filter_is_named(wanted: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wanted))):
        find(EpisodeRows(), wanted)


def test_episode_opens_with_versions_probabilities_and_advantage(tmp_path: Path) -> None:
    source = read(make_run(tmp_path / "a").root)
    found = source.episode("g0000000/0")
    assert [s["kind"] for s in found["segments"]] == [
        *("prompt", "action", "observation", "action")
    ]
    action = found["segments"][1]
    assert action["versions"] == [[3, 1], [4, 1]]  # new weights in the middle of a turn
    assert len(action["texts"]) == len(action["logprobs"]) == 2
    # Members 0 and 3 of four are solved: 1 - (0 + 0 + 1) / 3.
    assert found["advantage"] == pytest.approx(2 / 3)
    assert found["trained_at"] == 1


def test_scripted_episode_shows_its_actions(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    actions = ["go to the red ball", "", "pick up \u7403"]
    played = replace(
        episode(40, text_ids=[0, 1, 2]),
        policy=PolicyKind.EXPERT,
        kind=EpisodeKind.EVAL,
        loss_mask=np.ones(3, bool),
        versions=np.full(3, -1, np.int32),
        turn_ids=np.arange(3, dtype=np.int32),
        num_turns=3,
        num_invalid_actions=0,
        invalid_turns=np.zeros(3, bool),
        turn_scores=np.zeros(3, np.float32),
    )
    kept = replace(played, episode_id="eval/kept", action_chars=chars_of(actions))
    append(run_dir, kept, replace(played, episode_id="eval/old"))
    source = read(tmp_path / "run")
    shown = source.episode("eval/kept")["segments"]
    assert [(each["kind"], each["turn"], each["texts"]) for each in shown] == [
        ("action", 0, ["go to the red ball"]),
        ("action", 1, [""]),
        ("action", 2, ["pick up \u7403"]),
    ]
    recorded = source.recorded("eval/kept")
    assert (recorded["actions"], recorded["shown"]) == (actions, [])
    old = source.episode("eval/old")["segments"]
    assert [each["texts"] for each in old] == [["(action not in the journal)"]] * 3
    with pytest.raises(ConfigError, match="actions of this policy are not in the journal"):
        source.recorded("eval/old")


def test_group_shows_first_difference_of_its_members(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    append(run_dir, episode(0), episode(1, text_ids=(5, 6, 7, 99, 9, 10, 11, 12)))
    members = read(run_dir.root).group("g0000000")["members"]
    assert members[0]["differs"] is None
    assert (members[1]["differs"]["token"], members[1]["differs"]["turn"]) == (3, 0)
    assert [m["advantage"] for m in members] == [1.0, -1.0]


def test_advantage_equals_the_learner_value() -> None:
    from torch import tensor

    from common.config.algorithm import Baseline
    from learner.algorithms import grpo

    rewards = [0.0, 0.5, 1.0, 1.0]
    for baseline in Baseline:
        for normalize in (False, True):
            ours = group_advantages(rewards, baseline=baseline.value, normalize_std=normalize)
            theirs = grpo.group_advantages(
                tensor(rewards), baseline=baseline, normalize_std=normalize
            )
            assert ours == pytest.approx(theirs.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "answer", "sent"),
    [
        (AgentFormat.PLAIN, "<think>Why? Action: b</think>\n\ngo left", "go left"),
        (AgentFormat.REACT, "Action: b?</think>\n\nAction: a", "a"),
        (AgentFormat.REACT, "no action", ""),
        (
            AgentFormat.FUNCTION_CALL,
            '{"name": "press", "arguments": {"action": "a"}}',
            '{"tool": "press", "arguments": {"action": "a"}}',
        ),
        (AgentFormat.FUNCTION_CALL, '{"name": "maze", "arguments": {"action": "a"}}', "a"),
        (AgentFormat.FUNCTION_CALL, "It is 7.", "It is 7."),
    ],
)
def test_replayed_action_is_that_of_the_episode(kind: AgentFormat, answer: str, sent: str) -> None:
    assert _action_of(answer, format=kind, number=action_number(sent)) == sent


def test_advantage_is_shown_only_where_the_rewards_determine_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    config = yaml.safe_load(run_dir.config.read_text(encoding="utf-8"))

    def shown(**changed: Mapping[str, object]) -> list[float | None]:
        settings = {name: {**config.get(name, {}), **values} for name, values in changed.items()}
        run_dir.config.write_text(yaml.safe_dump(config | settings), encoding="utf-8")
        return [each["advantage"] for each in read(run_dir.root).group("g0000000")["members"]]

    leave_one_out = shown()
    assert None not in leave_one_out
    group_mean = shown(algorithm={"advantage": "grpo", "baseline": "group_mean"})
    assert group_mean == pytest.approx([0.75 * (each or 0.0) for each in leave_one_out], abs=1e-5)
    assert shown(algorithm={"advantage": "rloo", "baseline": "group_mean"}) == leave_one_out
    for section, values in (
        ("algorithm", {"advantage": "ppo"}),
        ("algorithm", {"reward_level": "turn"}),
        ("algorithm", {"invalid_action_penalty": 0.1, "invalid_action_level": "turn"}),
        ("algorithm", {"teacher": {"path": "teacher"}}),
        ("groups", {"reward": "rank.py:compare"}),
        ("groups", {"forks": 2}),
    ):
        assert set(shown(**{section: values})) == {None}, values


def test_damaged_journal_is_reported_and_rest_shown(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 8)
    path = run_dir.journal / "000000.log"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with (
        run_dir.steps.open("a", encoding="utf-8") as steps,
        run_dir.metrics.open("a", encoding="utf-8") as metrics,
    ):
        steps.write("not json\n")
        metrics.write("[1, 2]\n")
    source = read(run_dir.root)
    assert source.rows.num == 7
    told = "\n".join(source.problems())
    assert "000000.log at offset" in told
    assert "steps.jsonl: line 2 is damaged" in told
    assert "metrics.jsonl: line 13 is damaged" in told


def test_episode_damaged_after_reading_is_refused(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 2)
    source = read(run_dir.root)
    path = run_dir.journal / "000000.log"
    content = bytearray(path.read_bytes())
    content[len(MAGIC) + 60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(WireError, match=r"000000\.log at offset 0"):
        source.episode("g0000000/0")


def test_torn_tail_is_read_once_complete(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 3)
    path = run_dir.journal / "000000.log"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    source = read(run_dir.root)
    assert (source.rows.num, source.index.problems) == (2, [])
    path.write_bytes(whole)
    source.refresh()
    assert source.rows.num == 3


def test_training_without_episodes_lacks_no_outcomes(tmp_path: Path) -> None:
    """The folder of `sft` has metrics, and neither a journal nor outcomes."""
    run_dir = make_run(tmp_path / "a", 1)
    run_dir.outcomes.unlink()
    assert "outcomes.jsonl is missing" in "\n".join(read(run_dir.root).problems())
    shutil.rmtree(run_dir.journal)
    assert "outcomes.jsonl" not in "\n".join(read(run_dir.root).problems())


def test_old_formats_are_shown_with_their_gaps(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    (run_dir.journal / "000000.log").write_bytes(b"")
    import struct
    import zlib

    packed = pack_record(episode(0))
    record = struct.pack("<II", len(packed), zlib.crc32(packed)) + packed
    (run_dir.journal / "000000.log").write_bytes(record)
    run_dir.outcomes.unlink()
    (run_dir.tokenizer / "tokenizer.json").unlink()
    source = read(run_dir.root)
    assert source.episode("g0000000/0")["segments"][0]["texts"] == ["⟨5⟩", "⟨6⟩"]
    told = "\n".join(source.problems())
    assert "outcomes.jsonl is missing, as in runs of older versions" in told
    assert "Tokens are shown as ids" in told


def test_packed_segment_is_read_and_opened(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 3)
    pack(run_dir.journal, 0)
    source = read(run_dir.root)
    assert source.rows.num == 3
    assert source.episode("g0000000/2")["id"] == "g0000000/2"


def test_file_of_conversations_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "traj.json"
    said = [{"from": "human", "value": "go"}, {"from": "gpt", "value": "<script>", "loss": True}]
    records = [{"conversations": said, "item_id": f"babyai_{i}", "reward": i / 2} for i in range(3)]
    path.write_text(json.dumps(records), encoding="utf-8")
    source = open_source(str(path), runs=tmp_path)
    assert isinstance(source, ConversationFile)
    source.refresh()
    found = source.page({"env": "babyai", "sort": "best"}, start=0, num=2)
    assert [row["item"] for row in found["rows"]] == ["babyai_2", "babyai_1"]
    assert source.episode("2")["segments"][1]["texts"] == ["<script>"]


def test_foreign_file_and_missing_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "foreign.bin").write_bytes(b"\x7fELF\0\n\1\2")
    with pytest.raises(ConfigError, match="neither a run nor a conversation file"):
        open_source(str(tmp_path / "foreign.bin"), runs=tmp_path)
    make_run(tmp_path / "alpha", 1)
    with pytest.raises(ConfigError, match="Its runs are: alpha"):
        open_source("beta", runs=tmp_path)


def test_later_runs_are_discovered(tmp_path: Path) -> None:
    sources = Sources([], runs=tmp_path)
    assert sources.list_all() == []
    make_run(tmp_path / "late", 1)
    assert [each.name for each in sources.list_all()] == ["late"]
    assert sources.get("late").path == tmp_path / "late"


def many(run_dir: RunDir, start: int, num: int) -> None:
    append(run_dir, *(episode(i) for i in range(start, start + num)))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose journal is just large enough for a cache of its index."""
    run_dir = make_run(tmp_path_factory.mktemp("large") / "a", 0)
    many(run_dir, 0, MIN_ROWS)
    return run_dir.root


@pytest.fixture
def run_dir(large: Path, tmp_path: Path) -> RunDir:
    """A copy of the large run."""
    return RunDir(root=Path(shutil.copytree(large, tmp_path / "a")))


def test_cached_journal_is_not_read_again(run_dir: RunDir, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = read(run_dir.root, cache=cache)
    many(run_dir, MIN_ROWS, 4)
    late = [f"g{MIN_ROWS // 4:07d}/0", "failed", "engine", 3]
    with run_dir.outcomes.open("a", encoding="utf-8") as outcomes:
        outcomes.write(json.dumps(late) + "\n")
    again = RunSource(run_dir.root, name="a", cache=cache)
    again.refresh(budget_s=0.0)  # no time to read anything
    assert again.rows.num == MIN_ROWS
    again.refresh(budget_s=1.0)
    fresh = read(run_dir.root)
    assert whole.rows.num == MIN_ROWS
    assert again.rows.ids == fresh.rows.ids
    assert [again.rows.get(i) for i in range(again.rows.num)] == [
        fresh.rows.get(i) for i in range(fresh.rows.num)
    ]
    assert again.page({"outcome": "failed"}, start=0, num=9) == fresh.page(
        {"outcome": "failed"}, start=0, num=9
    )
    assert again.rows.get(again.rows.row_of[late[0]])["outcome"] == "failed"
    assert again.index.progress() == fresh.index.progress() == 1.0


@pytest.mark.parametrize(
    "what",
    long_for(
        ["another run", "no cache", "damaged cache", "cut outcomes"], ["no cache", "cut outcomes"]
    ),
)
def test_stale_index_of_another_journal_is_discarded(
    run_dir: RunDir, tmp_path: Path, what: str
) -> None:
    cache = tmp_path / "cache"
    read(run_dir.root, cache=cache)
    (kept,) = cache.glob("*.npz")
    if what == "another run":
        shutil.rmtree(run_dir.root)
        run_dir = make_run(tmp_path / "a", 0)
        many(run_dir, 8, MIN_ROWS)
    elif what == "no cache":
        kept.unlink()
        cache.chmod(0o500)
    elif what == "damaged cache":
        kept.write_bytes(kept.read_bytes()[:-3000])
    else:
        run_dir.outcomes.write_text(
            json.dumps(["g0000001/1", "stale", "lag", 1]) + "\n", encoding="utf-8"
        )
    again, fresh = read(run_dir.root, cache=cache), read(run_dir.root)
    assert again.rows.ids == fresh.rows.ids
    assert again.flow() == fresh.flow()


def test_damaged_journal_is_reported_at_every_opening(run_dir: RunDir, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    many(run_dir, MIN_ROWS, 9)
    path = run_dir.journal / "000000.log"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    for _ in range(2):
        told = "\n".join(read(run_dir.root, cache=cache).problems())
        assert "000000.log at offset" in told


def test_evaluation_episodes_are_not_compared_as_group(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    for i in range(3):
        played = replace(episode(i), kind=EpisodeKind.EVAL, group_id="eval-after-model")
        append(run_dir, replace(played, episode_id=f"eval-after-model/{i}", item_id=f"Go-test-{i}"))
    members = read(run_dir.root).group("eval-after-model")["members"]
    assert [each["advantage"] for each in members] == [None] * 3
    assert [each["differs"] for each in members] == [None] * 3


def test_concurrent_reads_of_growing_run_are_consistent(tmp_path: Path) -> None:
    source = read(make_run(tmp_path / "a").root)
    values = source.rows.get(0)
    stop = threading.Event()

    def grow() -> None:
        for i in itertools.count():
            if stop.is_set():
                break
            source.rows.add(f"h{i}", {**values, "item": f"item-{i}"})
            source.metrics._add({"step": 100.0 + i, "time_s": float(i), f"new/{i % 900}": 1.0})
            source._outcomes._waiting[f"absent-{i}"] = ("failed", "lease_expired", 1)

    writer, before = threading.Thread(target=grow), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer.start()
    try:
        for _ in range(30):
            assert overview(source)["verdict"]
            assert source.page({"outcome": "failed"}, start=0, num=5)["absent"]
            assert samples(source.rows)
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)


def test_hundred_thousand_episodes_filter_within_300_ms() -> None:
    rows = EpisodeRows()
    values = dict.fromkeys(INTS, 1) | dict.fromkeys(FLOATS, 0.5) | dict.fromkeys(NAMES, "x")
    for i in range(NUM_MANY):
        own = {"item": f"item-{i % 997}", "group": f"g{i // 8}", "reward": (i % 100) / 100}
        rows.add(f"g{i // 8}/{i % 8}", {**values, **own, "env": f"env{i % 7}"})
    wanted = {"env": "env3", "min_reward": "0.5", "text": "item-12", "sort": "best"}
    for each in (wanted, {}, {"text": "9"}, {"group": "g77"}):
        seconds = min(_seconds(rows, each) for _ in range(3))
        assert seconds < 0.3, each
    found = find(rows, wanted)
    rewards = rows.column("reward")[found]
    assert found.size > 0
    assert np.all(np.diff(rewards) <= 0)


def _seconds(rows: EpisodeRows, wanted: dict[str, str]) -> float:
    started = time.thread_time()
    page(rows, wanted, start=0, num=100)
    return time.thread_time() - started


def test_joined_token_texts_equal_the_tokenizer_decoding() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    for text in ("go to the red ball", "zażółć gęślą 🙂 שלום", "<script>\x1b[2J\0"):
        ids = tokenizer.encode(text).ids
        assert "".join(TokenTexts(TOKENIZER).texts(ids)) == text


def test_long_episode_opens_within_150_ms(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", 0)
    ids = [5 + i % 300 for i in range(50_000)]
    append(run_dir, replace(episode(0, text_ids=ids), env="babyai"))
    source = read(run_dir.root)
    source.texts()
    seconds: list[float] = []
    for _ in range(3):
        started = time.thread_time()
        json.dumps(source.episode("g0000000/0"))
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.15


def test_evaluation_and_examples_of_a_name_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "eval", 3)
    part = tmp_path / "b" / "sft"
    part.mkdir(parents=True)
    (part / "config.yaml").write_text("run: {name: sft}\n", encoding="utf-8")
    (part / "demonstrations.jsonl").write_text(
        '{"conversations": [{"from": "gpt", "loss": true, "value": "go"}]}\n', encoding="utf-8"
    )
    assert find_run("a", runs=tmp_path) == tmp_path / "a" / "eval"
    source = open_source("b", runs=tmp_path)
    source.refresh(budget_s=9.0)
    assert len(source.rows.ids) == 1
    names = {source.name for source in Sources([], runs=tmp_path).list_all()}
    assert names == {"a/eval", "b/sft", "b/sft/demonstrations"}


def test_finished_command_beside_a_run_shows_its_own_steps(tmp_path: Path) -> None:
    part = RunDir(root=tmp_path / "a" / "sft")
    part.root.mkdir(parents=True)
    part.config.write_text("train: {num_steps: 240}\n", encoding="utf-8")
    part.metrics.write_text('{"step": 12, "sft/loss": 0.5}\n', encoding="utf-8")
    stopped = read(part.root).summary()
    mark_finished(part, version=12, result="")
    finished = read(part.root).summary()
    assert (stopped["state"], finished["state"]) == ("stopped", "finished")
    assert (finished["step"], finished["num_steps"]) == (12, None)
    assert overview(read(part.root))["verdict"]["sentence"] == ""


def test_compared_runs_of_different_lengths_have_points_at_equal_steps(tmp_path: Path) -> None:
    runs = []
    for name, num in (("a", 1500), ("b", 2500)):
        run_dir = RunDir(root=tmp_path / name)
        run_dir.root.mkdir()
        lines = (json.dumps({"step": i, "reward/success": 0.5}) for i in range(1, num + 1))
        run_dir.metrics.write_text("\n".join([*lines, ""]), encoding="utf-8")
        runs.append(read(run_dir.root))
    shown = compare(runs)
    short, long = (shown["series"][run.name]["step"] for run in runs)
    assert len(short) == 500
    assert short == long[:500]
    assert shown["quantiles"] == [pytest.approx(12.7062)]
