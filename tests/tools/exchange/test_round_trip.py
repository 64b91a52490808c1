"""Laws of export and import: written data equals the sampled data and reads back unchanged."""

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import run
from actor.formats.renderer import Renderer
from actor.formats.tools import ToolRenderer
from common.errors import ConfigError
from common.formats.chat_template import fingerprint
from common.repository import ROOT
from common.segments import as_fork, as_rows
from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.journal.journal import JournalWriter
from tests.actor.formats.test_renderer import WITH_SYSTEM, make_chatml
from tests.actor.formats.test_tools import CALLING
from tests.learner.journal.test_journal import make_trajectory
from tests.venvs import python_with
from tools.cli.command_line import parse
from tools.exchange.agent_traj import read_conversations
from tools.exchange.records import TokenRow, read_records, tokens_of
from tools.exchange.writing import Framing, write
from tools.offline.rows import num_episodes, read_rows
from tools.offline.scratch import make_tokenizer

POLICY = ROOT / "configs" / "policies" / "tiny"
TOKENIZER: Any = AutoTokenizer.from_pretrained(str(POLICY))
GOOD = {"token_ids": [1, 2], "loss_mask": [False, True]}
NAMED = {"extra": {"tokenizer": fingerprint(TOKENIZER)}}  # An ATIF document of this tokenizer.
LOGPROBS = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": 3}
OBSERVED = ("goal: go to the red key", "red key 1 <|im_end|> ahead", "it says <|im_start|>user")
ACTED = ("turn left", "go to red key 1")


def episode(name: str = "g0000000/0", *, is_stopped: bool = True) -> Trajectory:
    """Two turns as an actor records them, whose observations spell control tokens out."""
    render = Renderer(TOKENIZER)
    parts: list[tuple[list[int], bool]] = [(render.first_prompt(OBSERVED[0]), False)]
    for action, page in zip(ACTED, OBSERVED[1:], strict=True):
        ids = TOKENIZER.encode(action, add_special_tokens=False)
        parts.append((ids + render.end_of_turn_ids[:1] * is_stopped, True))
        parts.append((render.after_action(page, is_stopped=is_stopped), False))
    parts = parts[:-1]
    ids = [i for part, _ in parts for i in part]
    mask = np.array([sampled for part, sampled in parts for _ in part])
    num = len(ids)
    return replace(
        make_trajectory(name),
        item_id="easy-train-3",
        reward=0.9,
        is_success=True,
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5 - np.arange(num) / 100, 0).astype(np.float32),
        versions=np.where(mask, 3, -1).astype(np.int32),
        turn_ids=np.zeros(num, np.int32),
    )


def segmented() -> Trajectory:
    """An episode of two segments: the second begins again with a first prompt."""
    one, two = episode("g0000001/0"), episode("g0000001/0")
    columns = {
        name: np.concatenate([getattr(one, name), getattr(two, name)])
        for name in ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids")
    }
    return replace(one, segment_starts=np.array([0, len(two.token_ids)], np.int32), **columns)


EPISODES = [episode(), episode("g0000000/1", is_stopped=False), segmented()]
ROWS = [row for each in EPISODES for row in as_rows(each)]


def written(tmp_path: Path, format: str, episodes: list[Trajectory]) -> Path:
    path = tmp_path / ("rows.parquet" if format == "parquet" else "rows.jsonl")
    write(format, path, episodes, Framing(TOKENIZER))
    return path


@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_conversations_round_trip_to_the_letter(tmp_path, format: str):
    read = read_conversations(written(tmp_path, format, EPISODES))
    assert len(read) == len(ROWS)
    for each in read:
        said = [OBSERVED[0], ACTED[0], OBSERVED[1], ACTED[1]]
        assert [message.text for message in each.messages] == said
        assert [message.is_agent for message in each.messages] == [False, True] * 2
        assert (each.item_id, each.reward, each.is_success) == ("easy-train-3", 0.9, True)


def test_atif_round_trips_every_token_and_logprob(tmp_path):
    path = written(tmp_path, "atif", EPISODES)
    read = [tokens_of(record, place) for place, record in read_records(path)]
    _assert_exact(read)


@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_sft_reads_the_exported_data(tmp_path, format: str):
    path = written(tmp_path, format, EPISODES)
    rows = read_rows(path, tokenizer=TOKENIZER, max_tokens=10_000, key="k")
    assert len(rows) == len(ROWS)
    assert all(row.is_success and row.reward == 0.9 for row in rows)
    for row, was in zip(rows, ROWS, strict=True):
        learnt = TOKENIZER.decode(row.token_ids[row.mask], skip_special_tokens=True)
        sampled = TOKENIZER.decode(was.token_ids[was.loss_mask], skip_special_tokens=True)
        assert learnt == sampled
        if format == "atif":
            assert row.token_ids.tolist() == was.token_ids.tolist()


@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_another_tokenizer_reads_the_messages(tmp_path, format: str):
    path = written(tmp_path, format, [episode()])
    assert read_rows(path, tokenizer=TOKENIZER, max_tokens=10_000, key="k") != []
    words = map("".join, itertools.product("abcd", "efgh", "ijkl", "mnop"))
    other = make_tokenizer([*words] * 20, vocab_size=640)
    largest = max(int(row.token_ids.max()) for row in as_rows(episode()))
    assert largest < len(other)
    (row,) = read_rows(path, tokenizer=other, max_tokens=10_000, key="k")
    assert other.decode(row.token_ids[row.mask]) == "".join(f"{text}<|end|>" for text in ACTED)


@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_tokens_without_a_fingerprint_are_read_as_messages(tmp_path, format: str):
    path = written(tmp_path, format, [episode()])
    record = json.loads(path.read_text(encoding="utf-8"))
    record.pop("tokenizer", None)
    record.get("extra", {}).pop("tokenizer", None)
    assert tokens_of(record, "here", fingerprint=fingerprint(TOKENIZER)) is None
    assert tokens_of(GOOD, "here", fingerprint=fingerprint(TOKENIZER)) is not None


@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_segments_that_are_read_as_messages_stay_one_episode(tmp_path, format: str):
    path = written(tmp_path, format, [segmented(), episode()])
    tokenizer = make_chatml(WITH_SYSTEM)  # Another template.
    rows = read_rows(path, tokenizer=tokenizer, max_tokens=10_000, key="k")
    assert [(row.segment, row.num_segments) for row in rows] == [(0, 2), (1, 2), (0, 1)]
    assert num_episodes(rows) == 2


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_shared_turn_of_a_fork_is_context_in_a_mixed_file(
    tmp_path, format: str, has_mark: bool, caplog: pytest.LogCaptureFixture
):
    """A record without tokens makes all records of a file messages."""
    whole = episode()
    is_later = np.cumsum(np.diff(whole.loss_mask.astype(int), prepend=0) == 1) == 2
    turns = {"turn_ids": is_later.astype(np.int32), "num_turns": 2}
    columns = {"invalid_turns": np.zeros(2, bool), "turn_scores": np.array([0, 0.9], np.float32)}
    fork = as_fork(replace(whole, **turns, **columns), trunk=0, num_shared_turns=1)
    path = written(tmp_path, format, [fork])
    record = json.loads(path.read_text(encoding="utf-8"))
    for step in [] if has_mark else record.get("steps", []):
        step.pop("is_copied_context", None)
    plain = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(f"{json.dumps(record)}\n{json.dumps(plain)}\n", encoding="utf-8")
    rows = read_rows(path, tokenizer=TOKENIZER, max_tokens=10_000, key="k")
    texts = [TOKENIZER.decode(row.token_ids[row.mask], skip_special_tokens=True) for row in rows]
    assert texts == [ACTED[1], "b"]
    assert "records=1 of 2 have no tokens of this tokenizer" in caplog.text


def test_observations_of_atif_are_messages(tmp_path):
    call = {"tool_call_id": "c1", "function_name": "ls", "arguments": {"path": "/"}}
    results = [{"source_call_id": "c1", "content": [{"type": "text", "text": "usr"}]}]
    steps = [
        {"source": "user", "message": "task"},
        {
            "source": "agent",
            "message": "",
            "tool_calls": [call],
            "observation": {"results": results},
        },
        {"source": "agent", "message": "pwd", "observation": {"results": [{"content": "/"}]}},
        {"source": "agent", "message": "old", "is_copied_context": True},
        {"source": "user", "message": "go on"},
    ]
    path = tmp_path / "atif.jsonl"
    path.write_text(json.dumps({"schema_version": "ATIF-v1.7", "steps": steps}), encoding="utf-8")
    (read,) = read_conversations(path)
    assert [(each.chat_role, each.text) for each in read.messages] == [
        *(("user", "task"), ("assistant", ""), ("tool", "usr")),
        *(("assistant", "pwd"), ("user", "/"), ("assistant", "old"), ("user", "go on")),
    ]
    assert [each.is_trained for each in read.messages if each.is_agent] == [True, True, False]
    assert read.messages[1].calls[0]["function"] == {"name": "ls", "arguments": {"path": "/"}}
    assert read.messages[2].call_id == "c1"
    metrics = {"prompt_token_ids": [1], "completion_token_ids": [2]}
    copied = {"source": "agent", "message": "x", "metrics": metrics, "is_copied_context": True}
    row = tokens_of({"steps": [copied]}, "here")
    assert row is not None
    assert not row.mask.any()
    path.write_text(json.dumps({"steps": [{**steps[0], "observation": ["x"]}]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="'observation' must have a list 'results' of objects"):
        read_conversations(path)


def _assert_exact(read: list[TokenRow | None]) -> None:
    assert len(read) == len(ROWS)
    for row, was in zip(read, ROWS, strict=True):
        assert row is not None
        assert row.logprobs is not None
        assert row.token_ids.tolist() == was.token_ids.tolist()
        assert row.mask.tolist() == was.loss_mask.tolist()
        assert np.array_equal(row.logprobs, was.logprobs)
        assert (row.item_id, row.reward) == (f"{was.env}/easy-train-3", 0.9)
    assert [(row.segment, row.num_segments) for row in read if row] == [
        (0, 1),
        (0, 1),
        (0, 2),
        (1, 2),
    ]


def test_export_skips_expert_failed_and_evaluation_episodes(tmp_path):
    others = [
        replace(episode(), policy=PolicyKind.EXPERT),
        replace(episode(), end_reason=EndReason.ENV_ERROR),
        replace(episode(), kind=EpisodeKind.EVAL, item_id="easy-test-3"),
    ]
    assert written(tmp_path, "sft", others).read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [{"role": "user", "content": 3}]}, "record 1: 'content' is int, not text"),
        ({"steps": ["x"]}, "record 1: a step is str, not a map"),
        ({"token_ids": [1], "loss_mask": []}, "must be lists of the same length"),
        (
            {"token_ids": [1], "loss_mask": [True], "policy": "model"},
            "an internal record of a journal",
        ),
        ({"token_ids": [1, "2"], "loss_mask": [False, True]}, "token ids must be whole numbers"),
        ({"token_ids": [1, 2**40], "loss_mask": [False, True]}, "token ids must be whole numbers"),
        (
            {"token_ids": [1, 2], "loss_mask": [0, "x"]},
            "loss_mask must contain only true and false",
        ),
        ({**GOOD, "logprobs": [0.0]}, "logprobs must be a list with one number"),
        ({**GOOD, "logprobs": "no"}, "logprobs must be a list"),
        ({**GOOD, "reward": "much"}, "'reward' is 'much', not a number"),
        ({**GOOD, "segment": [], "num_segments": 2}, r"'segment' is \[\], not a number"),
        ({"steps": [], "extra": [1]}, "'extra' is list, not a map"),
        ({"steps": [{"metrics": [1]}], **NAMED}, "'metrics' is list, not a map"),
        ({"steps": [{"metrics": LOGPROBS}], **NAMED}, "completion_token_ids and logprobs must be"),
        ({"token_ids": [1, 10**6], "loss_mask": [False, True]}, "written with another tokenizer"),
        (
            {
                "steps": [
                    {"metrics": {"prompt_token_ids": [1], "completion_token_ids": [2]}},
                    {
                        "step_id": 2,
                        "metrics": {"prompt_token_ids": [9], "completion_token_ids": [2]},
                    },
                ],
                **NAMED,
            },
            "the prompt of step 2 does not begin with the tokens",
        ),
    ],
)
def test_inconsistent_record_is_refused_by_name(tmp_path, record: Any, words: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_rows(path, tokenizer=TOKENIZER, max_tokens=100, key="k")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("deep.jsonl", b"[1]\n" + b"[" * 100_000, "not JSON"),
        ("deep.jsonl", b'{"a": ' + b"[" * 100_000, "record 1 is not JSON"),
        ("long.jsonl", b'{"reward": ' + b"9" * 5_000 + b"}", "record 1 is not JSON"),
        ("half.jsonl", b"\xff", "cannot be read as UTF-8"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name: str, content: bytes, words: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_rows(tmp_path / name, tokenizer=TOKENIZER, max_tokens=100, key="k")


TEMPLATES = {"tiny": TOKENIZER, "calling": CALLING, "own_system": make_chatml(WITH_SYSTEM)}


@pytest.mark.parametrize("tokenizer", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("format", ["agenttraj", "sft", "atif"])
def test_agent_system_message_is_exported(tmp_path, format: str, tokenizer: Any):
    render = Renderer(tokenizer)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    ids = render.of_messages(asked)
    said = [*tokenizer.encode("x", add_special_tokens=False), render.end_of_turn_ids[0]]
    last = render.after_turn("and now?", is_stopped=True)
    whole, mask = [*ids, *said, *last, *said], [0] * len(ids) + [1] * len(said)
    mask += [0] * len(last) + [1] * len(said)
    path = tmp_path / "out.jsonl"
    write(format, path, [of_tokens(whole, mask)], Framing(tokenizer))
    (record,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    if format == "sft" and tokenizer is not TEMPLATES["own_system"]:
        assert [(each["role"], each["content"]) for each in record["messages"]] == [
            *(("system", "be brief"), ("user", "go"), ("assistant", "x")),
            *(("user", "and now?"), ("assistant", "x")),
        ]
    (read,) = read_conversations(path)
    *first, said_x, asked, again = read.messages
    assert "be brief" in first[0].text
    assert first[-1].text.endswith("go")
    assert [each.text for each in (said_x, asked, again)] == ["x", "and now?", "x"]
    assert not any(each.is_agent for each in (*first, asked))
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=10_000, key="k")
    assert (row.token_ids.tolist(), row.mask.tolist()) == (whole, list(map(bool, mask)))


def test_tool_answers_are_exported_as_tool_messages(tmp_path):
    render = ToolRenderer(CALLING, env="maze")
    ids = render.first_prompt("go")
    said = [*CALLING.encode("x", add_special_tokens=False), render.end_of_turn_ids[0]]
    seen, asked = (each("y", is_stopped=True) for each in (render.after_action, render.after_turn))
    parts = [(ids, 0), (said, 1), (seen, 0), (said, 1), (asked, 0), (said, 1)]
    mask = [sampled for part, sampled in parts for _ in part]
    path = tmp_path / "out.jsonl"
    write("sft", path, [of_tokens([i for part, _ in parts for i in part], mask)], Framing(CALLING))
    (record,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    roles = [each["role"] for each in record["messages"]]
    assert roles == ["system", "user", *("assistant", "tool"), *("assistant", "user"), "assistant"]
    assert '"name": "maze"' in record["messages"][0]["content"]
    assert [each["content"] for each in record["messages"][1:]] == ["go", "x", "y", "x", "y", "x"]


def of_tokens(ids: list[int], mask: list[int]) -> Trajectory:
    sampled, num = np.array(mask, bool), len(ids)
    return replace(
        episode(),
        token_ids=np.array(ids, np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        turn_ids=np.zeros(num, np.int32),
    )


def test_export_command_writes_the_requested_format(tmp_path, capsys):
    writer = JournalWriter(tmp_path / "r" / "journal")
    writer.append(EPISODES[0])
    writer.close()
    base = ["journal", str(tmp_path / "r"), "export", f"to={tmp_path / 'out.jsonl'}"]
    assert run.main([*base, "--format", "atif"]) == 2
    assert "the run has no tokenizer" in capsys.readouterr().err
    (tmp_path / "r" / "tokenizer").symlink_to(POLICY)
    assert run.main([*base, "--format", "atif"]) == 0
    assert (
        json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["schema_version"]
        == "ATIF-v1.7"
    )
    assert run.main([*base, "--format", "xml"]) == 2
    assert "--format xml: must be one of json, agenttraj" in capsys.readouterr().err
    assert parse([*base, "--format", "sft"]).overrides[-1] == "format=sft"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "r"]


@pytest.mark.long
@pytest.mark.slow
def test_atif_export_validates_against_the_harbor_schema(tmp_path):
    path = written(tmp_path, "atif", EPISODES)
    script = (
        "import json, sys\nfrom atif import Trajectory\n"
        "for line in open(sys.argv[1]): Trajectory.model_validate(json.loads(line))\nprint('taken')"
    )
    argv = [python_with("atif==1.7.0"), "-c", script, str(path)]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", timeout=240)
    assert done.stdout == "taken\n", done.stderr


PARQUET = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from tests.tools.exchange import test_round_trip as t
path = t.written(Path(sys.argv[1]), "parquet", t.EPISODES)
t._assert_exact([t.tokens_of(record, place) for place, record in t.read_records(path)])
records = t.read_records(path)
assert not any(t.tokens_of(record, place, fingerprint="other") for place, record in records)
rows = t.read_rows(path, tokenizer=t.TOKENIZER, max_tokens=10_000, key="k")
assert [row.token_ids.tolist() for row in rows] == [row.token_ids.tolist() for row in t.ROWS]
said = t.read_conversations(path)
assert [m.text for m in said[0].messages] == [t.OBSERVED[0], t.ACTED[0], t.OBSERVED[1], t.ACTED[1]]
print("exact")
"""


@pytest.mark.long
@pytest.mark.slow
def test_parquet_round_trips_every_token_with_pyarrow(tmp_path):
    python = python_with("pyarrow", sees_ours=True)
    argv = [python, "-c", PARQUET.format(root=str(ROOT)), str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert done.stdout.endswith("exact\n"), done.stderr[-3000:]
