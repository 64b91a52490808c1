"""Laws of token rows: the trained tokens of journals and conversations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.wire.messages import EndReason, EpisodeKind, PolicyKind
from learner.journal.journal import JournalWriter
from learner.recovery.reward_log import GroupReward, RewardLog
from tests.learner.builders import make_trajectory
from tools.exchange.agent_traj import Conversation, Message
from tools.offline.rows import newest, num_episodes, read_rows, row_of_conversation
from tools.offline.scratch import make_tokenizer

TEXTS = ["you see", "go", "a key", "pick up"]
TOKENIZER = make_tokenizer(TEXTS * 4, vocab_size=300)
CHATML = (
    "{%- for m in messages -%}<|user|>{{ m['role'] }} {{ m['content'] }}<|end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|user|>assistant {% endif -%}"
)


def say(*texts: str, first_is_trained: bool = True) -> Conversation:
    """A conversation of user, agent, user, agent, ..."""
    messages = [
        Message(is_agent=i % 2 == 1, is_trained=i % 2 == 1 and (i > 1 or first_is_trained), text=t)
        for i, t in enumerate(texts)
    ]
    return Conversation(item_id="x", messages=messages)


def learnt(row) -> str:
    return cast(str, TOKENIZER.decode(row.token_ids[row.mask].tolist()))


def test_agent_tokens_train_with_their_end() -> None:
    row = row_of_conversation(TOKENIZER, say(*TEXTS))
    expected = "<|user|>you see<|assistant|>go<|end|><|user|>a key<|assistant|>pick up<|end|>"
    assert TOKENIZER.decode(row.token_ids.tolist()) == expected
    assert learnt(row) == "go<|end|>pick up<|end|>"


def test_a_message_without_loss_is_not_learnt() -> None:
    row = row_of_conversation(TOKENIZER, say(*TEXTS, first_is_trained=False))
    assert learnt(row) == "pick up<|end|>"


def test_template_text_after_a_turn_is_not_trained() -> None:
    tokenizer = make_tokenizer(TEXTS * 4, vocab_size=300)
    tokenizer.chat_template = CHATML
    row = row_of_conversation(tokenizer, say(*TEXTS))
    text = tokenizer.decode(row.token_ids.tolist())
    assert "go<|end|>\n" in text
    assert tokenizer.decode(row.token_ids[row.mask].tolist()) == "go<|end|>pick up<|end|>"


def test_the_ids_are_the_template_s_own() -> None:
    conversation = say(*TEXTS)
    chat = [
        {"role": "assistant" if m.is_agent else "user", "content": m.text}
        for m in conversation.messages
    ]
    rendered = cast(str, TOKENIZER.apply_chat_template(chat, tokenize=False))
    whole = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert row_of_conversation(TOKENIZER, conversation).token_ids.tolist() == whole


def test_control_tokens_in_a_message_are_plain_text() -> None:
    special = TOKENIZER.all_special_ids
    framing = [i for i in row_of_conversation(TOKENIZER, say(*TEXTS)).token_ids if i in special]
    spelled = say("see <|end|><|assistant|>x", "go<|end|>", "<|user|>", "up")
    row = row_of_conversation(TOKENIZER, spelled)
    assert [i for i in row.token_ids if i in special] == framing
    assert learnt(row) == "go<|end|><|end|>up<|end|>"
    assert sum(row.token_ids[row.mask] == TOKENIZER.eos_token_id) == 2


def test_answer_without_an_observation_before_it_is_refused() -> None:
    roles = (False, True, True)
    said = [Message(is_agent=each, is_trained=each, text="go") for each in roles]
    conversation = Conversation(item_id="x", messages=said, place="d.jsonl: record 3")
    with pytest.raises(ConfigError, match=r"d\.jsonl: record 3: messages: the agent's message"):
        row_of_conversation(TOKENIZER, conversation)


def test_rows_are_cut_and_rows_without_loss_omitted(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    records = [
        {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "go"}]}
        for text in ("a" * 40, "a")
    ]
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    rows = read_rows(path, tokenizer=TOKENIZER, max_tokens=8, key="k")
    assert len(rows) == 1
    assert len(rows[0].token_ids) == len(rows[0].mask) <= 8
    with pytest.raises(ConfigError, match=r"k=.*no episode has a token"):
        read_rows(path, tokenizer=TOKENIZER, max_tokens=2, key="k")


def test_journal_rows_train_sampled_tokens_only(tmp_path: Path) -> None:
    good = make_trajectory([5, 6, 7], [0, 1, 1])
    writer = JournalWriter(tmp_path / "run" / "journal")
    for index, trajectory in enumerate(
        [
            good,
            replace(good, end_reason=EndReason.ENV_ERROR, error="gone"),
            replace(good, policy=PolicyKind.EXPERT),
            replace(good, kind=EpisodeKind.EVAL, item_id="toy-test-0"),
        ]
    ):
        writer.append(replace(trajectory, episode_id=f"g/{index}"))
    writer.close()
    for place in (tmp_path / "run", tmp_path / "run" / "journal"):
        (row,) = read_rows(place, tokenizer=TOKENIZER, max_tokens=8, key="k")
        assert row.token_ids.tolist() == [5, 6, 7]
        assert row.mask.tolist() == [False, True, True]
        assert (row.item_id, row.reward) == ("toy/toy-train-0", 1.0)


def test_held_out_items_of_any_subset_are_left_out(tmp_path: Path) -> None:
    played = replace(make_trajectory([5, 6, 7], [0, 1, 1]), kind=EpisodeKind.EVAL)
    writer = JournalWriter(tmp_path)
    for item_id in ("my-train-set-test-3", "my-test-set-train-3"):
        writer.append(replace(played, item_id=item_id, episode_id=f"{item_id}/0"))
    writer.close()
    (row,) = read_rows(tmp_path, tokenizer=TOKENIZER, max_tokens=8, key="k")
    assert row.item_id == "toy/my-test-set-train-3"


def test_rewards_over_a_group_replace_those_of_the_environment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third member and the other group have no reward of their group."""
    journal = tmp_path / "run" / "journal"
    writer = JournalWriter(journal)
    played = make_trajectory([5, 6, 7], [0, 1, 1])
    for group_id, member in (("g0000001", 0), ("g0000001", 1), ("g0000001", 2), ("g0000002", 0)):
        name = {"group_id": group_id, "episode_id": f"{group_id}/{member}", "member": member}
        writer.append(replace(played, **name))
    writer.close()
    log = RewardLog(journal / "group_rewards.jsonl")
    log.append(GroupReward(group_id="g0000001", rewards={0: 0.25, 1: 0.75}))
    log.close()
    rows = read_rows(tmp_path / "run", tokenizer=TOKENIZER, max_tokens=8, key="k")
    assert [(row.episode, row.reward) for row in rows] == [
        ("g0000001/0", 0.25),
        ("g0000001/1", 0.75),
    ]
    assert "left out episodes=2" in caplog.text


def test_journal_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make_tokenizer(["zebra crossing"] * 8, vocab_size=300)
    ids = range(min(len(TOKENIZER), len(other)))
    tokens = TOKENIZER.convert_ids_to_tokens
    differs = next(i for i in ids if tokens(i) != other.convert_ids_to_tokens(i))
    run_dir = RunDir(root=tmp_path)
    writer = JournalWriter(run_dir.journal)
    writer.append(make_trajectory([5, 6, differs], [0, 1, 1]))
    writer.close()
    TOKENIZER.save_pretrained(run_dir.tokenizer)
    assert len(read_rows(tmp_path, tokenizer=TOKENIZER, max_tokens=8, key="k")) == 1
    with pytest.raises(ConfigError, match=rf"token {differs} is '.*' in the run and"):
        read_rows(tmp_path, tokenizer=other, max_tokens=8, key="k")


def test_training_items_played_outside_a_run_are_trained(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.append(replace(make_trajectory([5, 6, 7], [0, 1, 1]), kind=EpisodeKind.EVAL))
    writer.close()
    assert len(read_rows(tmp_path, tokenizer=TOKENIZER, max_tokens=8, key="k")) == 1


def test_an_episode_counts_without_its_first_segment(tmp_path: Path) -> None:
    """Of two segments each, the rows that are left are: 1; 0; 1. They are three episodes."""
    one = make_trajectory([5, 6, 7, 8], [0, 1, 0, 1])
    starts = np.array([0, 2], dtype=np.int32)
    masks = [[0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
    writer = JournalWriter(tmp_path)
    for index, mask in enumerate(masks):
        own = replace(one, episode_id=f"g/{index}", segment_starts=starts)
        writer.append(replace(own, loss_mask=np.array(mask, dtype=bool)))
    writer.close()
    rows = read_rows(tmp_path, tokenizer=TOKENIZER, max_tokens=8, key="k")
    assert [row.segment for row in rows] == [1, 0, 1]
    assert num_episodes(rows) == 3
    assert newest(rows, 1) == rows[2:]
    assert newest(rows, 2) == rows[1:]


def test_a_path_without_anything_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dpo\.data=.*expected a run directory or a file"):
        read_rows(tmp_path / "no", tokenizer=TOKENIZER, max_tokens=8, key="dpo.data")
