"""Laws of the items: which record an item is, and which datasets are refused."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from common.config.envs import DatasetOptions
from common.errors import ConfigError
from common.repository import ROOT
from envhub.envs.dataset.files import Record
from envhub.envs.dataset.prompts import PromptMaker, Question, answer_text, tools_of
from envhub.envs.dataset.records import Dataset, load_dataset
from tests.envhub.envs.dataset import made
from tests.envhub.envs.dataset.made import DAPO, GSM8K, write_lines

HELD_OUT = {"question": "6 + 5?", "answer": "6+5=<<6+5=11>>11\n#### 11"}
NUMBERED = [{"prompt": f"question {i:03}", "answer": str(i)} for i in range(40)]


def load(folder: Path, records: Any = NUMBERED, **options: Any) -> Dataset:
    path = write_lines(folder / "train.jsonl", records)
    return load_dataset(DatasetOptions(**{"train": str(path), **options}))


def prompts(dataset: Dataset, split: str = "train") -> list[str]:
    numbers = dataset.splits[split].numbers
    return [dataset.question(split, i).messages[-1]["content"] for i in range(len(numbers))]


def test_items_keep_the_order_of_the_file(tmp_path: Path) -> None:
    dataset = load(tmp_path, eval_size=0)
    assert prompts(dataset) == [each["prompt"] for each in NUMBERED]


def test_shuffled_items_depend_only_on_the_seed(tmp_path: Path) -> None:
    first = prompts(load(tmp_path, eval_size=0, shuffle=1))
    assert first == prompts(load(tmp_path, eval_size=0, shuffle=1, max_turns=3))
    assert first != prompts(load(tmp_path, eval_size=0, shuffle=2))
    assert sorted(first) == prompts(load(tmp_path, eval_size=0))


def test_held_out_records_are_not_trained(tmp_path: Path) -> None:
    dataset = load(tmp_path)
    assert len(prompts(dataset, "test")) == 4  # a tenth
    assert {*prompts(dataset)} & {*prompts(dataset, "test")} == set()
    assert len(prompts(dataset)) == 36


def test_copies_of_held_out_prompts_are_not_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = load(tmp_path, NUMBERED * 3, eval_size=10, validation_size=10)
    splits = [{*prompts(dataset, name)} for name in ("train", "test", "validation")]
    assert not splits[0] & splits[1]
    assert not splits[0] & splits[2]
    assert "copies of held-out prompts are not trained" in caplog.text


@pytest.mark.parametrize("key", ["eval", "validation"])
def test_size_beside_data_of_their_own_has_a_warning(
    key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = [{"prompt": f"other {i}", "answer": str(i)} for i in range(7)]
    named = {key: str(write_lines(tmp_path / "other.jsonl", other))}
    load(tmp_path, **named)
    assert "no effect" not in caplog.text
    load(tmp_path, **named, **{f"{key}_size": 3})
    split = "test" if key == "eval" else key
    warning = f"data.{key}_size=3 has no effect: the {split} data are all 7 records of other.jsonl"
    assert warning in caplog.text


def test_copy_with_another_answer_in_its_messages_is_not_trained(tmp_path: Path) -> None:
    records = [
        {
            "messages": [
                {"role": "user", "content": f"question {number // 2}"},
                {"role": "assistant", "content": f"answer {number}"},
            ]
        }
        for number in range(40)
    ]
    dataset = load(tmp_path, records, eval_size=10)
    assert not {*prompts(dataset)} & {*prompts(dataset, "test")}


def test_copies_of_held_out_prompts_are_trained_if_there_are_no_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = load(tmp_path, NUMBERED[:1] * 5, eval_size=2)
    assert len(prompts(dataset)) == 3
    assert "all 3 records are copies of held-out prompts" in caplog.text


def test_equal_columns_are_other_prompts_with_another_template(tmp_path: Path) -> None:
    records = [{"prompt": "Add.", "input": str(number), "answer": "1"} for number in range(20)]
    dataset = load(tmp_path, records, eval_size=2, template="{{ prompt }} {{ input }}")
    assert len(prompts(dataset)) == 18


def test_equal_prompts_of_validation_and_test_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    test = write_lines(tmp_path / "test.jsonl", NUMBERED[:5])
    validation = write_lines(tmp_path / "validation.jsonl", NUMBERED[3:9])
    load(tmp_path, NUMBERED[20:], eval=str(test), validation=str(validation))
    assert "validation data contain prompts of the test data num=2 of=5" in caplog.text


def test_folder_with_a_test_split_is_evaluated_on_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", NUMBERED[:3])
    write_lines(tmp_path / "test.jsonl", NUMBERED[3:5])
    dataset = load_dataset(DatasetOptions(train=str(tmp_path)))
    assert prompts(dataset) == ["question 000", "question 001", "question 002"]
    assert prompts(dataset, "test") == ["question 003", "question 004"]


def test_length_is_in_characters_without_a_tokenizer(tmp_path: Path) -> None:
    records = [{"prompt": "x" * n, "answer": "1"} for n in (5, 6, 4)]
    assert prompts(load(tmp_path, records, max_length=5, eval_size=0)) == ["xxxxx", "xxxx"]


def test_length_is_in_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    records = [{"prompt": " green" * n, "answer": "1"} for n in (2, 3)]
    folder = str(ROOT / "configs" / "policies" / "tiny")  # " green" is one of its tokens.
    kept = prompts(load(tmp_path, records, max_length=2, tokenizer=folder, eval_size=0))
    assert kept == [" green green"]


def test_gsm8k_records_load_by_path(tmp_path: Path) -> None:
    dataset = load(tmp_path, GSM8K, eval_size=0)
    questions = [dataset.question("train", i) for i in range(3)]
    assert [each.messages for each in questions] == [
        [{"role": "user", "content": record["question"]}] for record in GSM8K
    ]
    assert [each.ground_truth for each in questions] == ["7", "2,400", "2.5"]


def test_dapo_records_load_by_path(tmp_path: Path) -> None:
    dataset = load(tmp_path, DAPO, eval_size=0)
    questions = [dataset.question("train", i) for i in range(3)]
    assert [each.messages for each in questions] == [record["prompt"] for record in DAPO]
    assert [each.ground_truth for each in questions] == ["9", "16", "25"]


def test_gsm8k_folder_gives_both_splits_and_rewards(tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    write_lines(tmp_path / "main" / "train-00000-of-00001.jsonl", GSM8K)
    write_lines(tmp_path / "main" / "test-00000-of-00001.jsonl", [HELD_OUT])
    options = made.options_of(tmp_path / "main")
    held_out = load_dataset(options.dataset).question("test", 0)
    assert (held_out.messages[-1]["content"], held_out.ground_truth) == ("6 + 5?", "11")
    answers = ("2*1200=<<2*1200=2400>>2400\n#### 2,400", "#### 2400", "2,400 nails", "#### 24")
    rewards = [made.played(options, answer, item=1).reward for answer in answers]
    assert rewards == [1.0, 1.0, 1.0, 0.0]


def test_dapo_folder_without_splits_rewards_its_answers(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "dapo-math-17k.jsonl", DAPO)
    options = made.options_of(tmp_path, eval_size=1)
    trained = load_dataset(options.dataset).question("train", 0)
    n = int(trained.messages[-1]["content"].split()[2])
    answers = (f"Answer: \\boxed{{{n * n}}}", f"Answer: {n * n}", f"Answer: \\boxed{{{n}}}")
    rewards = [made.played(options, answer).reward for answer in answers]
    assert rewards == [1.0, 1.0, 0.0]


def test_template_sees_columns_and_system_comes_first(tmp_path: Path) -> None:
    template = "{{ prompt }} ({{ answer }}, {{ record.answer|length }})"
    dataset = load(tmp_path, template=template, system="Be short.", eval_size=0)
    assert dataset.question("train", 7).messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "question 007 (7, 1)"},
    ]


def test_template_and_system_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("Q: {{ prompt }}", encoding="utf-8")
    (tmp_path / "s.txt").write_text("Use {{ braces }}.", encoding="utf-8")
    given = {"template": f"{tmp_path}/a.jinja", "system": f"{tmp_path}/s.txt"}
    assert load(tmp_path, eval_size=0, **given).question("train", 0).messages == [
        {"role": "system", "content": "Use {{ braces }}."},
        {"role": "user", "content": "Q: question 000"},
    ]


def test_final_assistant_message_is_the_reference(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye?"},
        {"role": "assistant", "content": "bye"},
    ]
    question = load(tmp_path, [{"messages": messages}], eval_size=0).question("train", 0)
    assert question.messages == messages[:3]
    assert question.answer == "bye"


@pytest.mark.parametrize(
    ("records", "options", "words"),
    [
        (NUMBERED, {"prompt": "text"}, "data.prompt=text: no such column; the columns are prompt,"),
        (NUMBERED, {"answer": "gold"}, "data.answer=gold: no such column; the columns are prompt,"),
        ([{"text": "x"}], {}, "data.prompt is not set; the columns are text"),
        ([*NUMBERED[:2], {"answer": "1"}], {}, "record 3 of .*: the record has no prompt"),
        ([*NUMBERED[:1], {"prompt": ""}], {}, "record 2 of .*: the record has no prompt"),
        ([{"prompt": 3}], {}, "record 1 of .*: the prompt is int, not a text or a list"),
        (NUMBERED, {"template": "{{ quest }}"}, "template fails on record 1 of .*'quest' is undef"),
        (NUMBERED, {"template": "{% if %}"}, "data.template: the template is wrong"),
        (NUMBERED, {"max_length": 3}, "data.max_length=3: every prompt of .* has more characters"),
        (NUMBERED, {"eval_size": 40}, "data.eval_size=40: data.train has only 40 records"),
        (
            [{"prompt": [{"role": "robot", "content": "x"}]}],
            {},
            "message 1 of the prompt needs a ro",
        ),
        ([{"prompt": [{"role": "user", "content": 3}]}], {}, "content 3, which is not text"),
        ([{"prompt": [{"role": "system", "content": "x"}]}], {}, "last message .* the user's"),
    ],
)
def test_wrong_dataset_is_refused_with_its_place(
    tmp_path: Path, records: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, records, **options)


def test_missing_dataset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is not set: give data\.train=FILE"):
        load_dataset(DatasetOptions())
    with pytest.raises(ConfigError, match=r"data\.train=no\.jsonl: no such file or folder \(from"):
        load_dataset(DatasetOptions(train="no.jsonl"))


def test_training_data_as_evaluation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it is the same data as data\.train"):
        load(tmp_path, eval=str(tmp_path / "train.jsonl"))
    copy = write_lines(tmp_path / "copy.jsonl", NUMBERED)
    with pytest.raises(ConfigError, match=r"it has the same content as data\.train"):
        load(tmp_path, eval=str(copy))


def test_file_of_two_splits_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_lines(tmp_path / f"{name}.jsonl", NUMBERED)
    path = tmp_path / "two.jsonl"
    with pytest.raises(ConfigError, match=r"data\.eval=.*two\.jsonl is also a file of data\.train"):
        load_dataset(DatasetOptions(train=str(tmp_path), eval=str(path)))


def test_digest_changes_with_content_and_item_settings(tmp_path: Path) -> None:
    first = load(tmp_path).content
    assert load(tmp_path, system="Be short.").content == first
    assert {k for k, v in load(tmp_path, shuffle=3).content.items() if first[k] != v} == {
        "data settings"
    }
    other = load(tmp_path, [*NUMBERED[:-1], {"prompt": "new", "answer": "1"}]).content
    assert {k for k, v in other.items() if first[k] != v} == {"data.train"}


def test_shipped_problems_come_from_their_script(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"__name__": "made", "__file__": ""}
    source = ROOT / "configs" / "data" / "make_arithmetic.py"
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), scope)
    scope["write"](tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        shipped = ROOT / "configs" / "data" / "arithmetic" / name
        assert (tmp_path / name).read_text(encoding="utf-8") == shipped.read_text(encoding="utf-8")
    questions = [
        [json.loads(each)["question"] for each in (tmp_path / name).read_text("utf-8").splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    ]
    assert [len({*each}) for each in questions] == [600, 200]
    assert {*questions[0]} & {*questions[1]} == set()


def question_of(record: Record) -> Question:
    """Return the question of a record with default settings."""
    return PromptMaker(DatasetOptions(), record).make(record, "record 1 of x.jsonl")


ASKED = {"role": "user", "content": "Add 1 and 2."}
CALL = {"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}


def test_missing_answer_of_a_table_is_none() -> None:
    assert answer_text(float("nan")) is None
    assert answer_text(Decimal("-1.50")) == "-1.50"
    assert answer_text(-1.5) == "-1.5"


def test_blank_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"record 2 .* has no prompt in its column 'prompt'"):
        load(tmp_path, [*NUMBERED[:1], {"prompt": " \n", "answer": "1"}])


def test_messages_and_calls_may_be_json_text() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": json.dumps([CALL])}
    result = {"role": "tool", "content": "3", "tool_call_id": 7}
    question = question_of({"prompt": json.dumps([ASKED, called, result, ASKED])})
    assert [each["role"] for each in question.messages] == ["user", "assistant", "tool", "user"]
    assert question.messages[1]["tool_calls"] == [CALL]
    assert question.messages[2]["tool_call_id"] == "7"
    assert question_of({"prompt": '[{"a": 1}] is JSON?'}).messages[0]["content"][0] == "["


def test_call_at_the_end_of_the_messages_is_the_reference() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = question_of({"messages": [ASKED, called]}).answer
    assert json.loads(answer or "") == [CALL["function"]]


def test_picture_with_an_empty_text_is_refused() -> None:
    part = {"type": "image_url", "text": "", "image_url": {"url": "x"}}
    with pytest.raises(ConfigError, match="which is not text"):
        question_of({"prompt": [{"role": "user", "content": [part]}]})


def test_tools_of_a_record_may_be_null_as_json_text() -> None:
    assert tools_of("null", "data.tools=tools") == []
