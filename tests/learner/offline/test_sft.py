"""Laws of supervised fine-tuning."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from common.config import RunConfig, SftSection
from common.config_learning import LearnerSection
from common.errors import ConfigError
from learner.model import load_policy
from learner.offline import sft
from learner.offline.agent_traj import Conversation, Message
from learner.offline.scratch import make_policy, make_tokenizer

TEXTS = ["you see a red ball", "go to red ball", "you see a blue key", "pick up blue key"]
TOKENIZER = make_tokenizer(TEXTS * 4, vocab_size=300)
TINY = SftSection(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=64,
    vocab_size=300,
    num_epochs=40,
    batch_tokens=64,
    lr=1e-2,
)


def say(*texts: str, first_is_trained: bool = True) -> Conversation:
    """A conversation of user, agent, user, agent, ..."""
    messages = [
        Message(is_agent=i % 2 == 1, is_trained=i % 2 == 1 and (i > 1 or first_is_trained), text=t)
        for i, t in enumerate(texts)
    ]
    return Conversation(item_id="x", messages=messages)


CORPUS = [say(TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[3]), say(TEXTS[2], TEXTS[3])] * 4


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def test_labels_are_exactly_the_agents_tokens_with_their_end() -> None:
    ids, labels = sft.encode(TOKENIZER, say("you see", "go", "a key", "pick up"))
    expected = "<|user|>you see<|assistant|>go<|end|><|user|>a key<|assistant|>pick up<|end|>"
    assert text_of(ids) == expected
    assert len(labels) == len(ids)
    assert all(label in (sft.IGNORED, i) for i, label in zip(ids, labels, strict=True))
    trained = [label for label in labels if label != sft.IGNORED]
    assert text_of(trained) == "go<|end|>pick up<|end|>"


def test_an_agents_message_without_loss_has_no_labels() -> None:
    _, labels = sft.encode(TOKENIZER, say("hi", "ok", "a key", "go", first_is_trained=False))
    assert text_of([label for label in labels if label != sft.IGNORED]) == "go<|end|>"


def test_the_ids_are_the_template_s_own() -> None:
    conversation = say("you see", "go", "a key", "pick up")
    chat = [
        {"role": "assistant" if m.is_agent else "user", "content": m.text}
        for m in conversation.messages
    ]
    rendered = TOKENIZER.apply_chat_template(chat, tokenize=False)
    whole = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert sft.encode(TOKENIZER, conversation)[0] == whole


def test_two_messages_of_one_side_in_a_row_are_refused() -> None:
    twice = [Message(is_agent=False, is_trained=False, text=t) for t in ("a", "b")]
    with pytest.raises(ConfigError, match="rewrites earlier turns"):
        sft.encode(TOKENIZER, Conversation(item_id="x", messages=twice))


def test_conversations_are_cut_and_those_left_without_loss_are_left_out() -> None:
    rows = sft.encode_all(TOKENIZER, [say("a" * 40, "go"), say("a", "go")], max_tokens=8)
    assert len(rows) == 1
    assert len(rows[0][0]) == len(rows[0][1]) <= 8
    with pytest.raises(ConfigError, match="within 8 tokens"):
        sft.encode_all(TOKENIZER, [say("a" * 40, "go")], max_tokens=8)


def test_an_epoch_holds_every_row_once_within_its_token_limit() -> None:
    rows = [([i] * length, [i] * length) for i, length in enumerate((5, 30, 7, 7, 12, 3, 64, 9))]
    epoch = list(sft.batches(rows, batch_tokens=32, generator=torch.Generator().manual_seed(0)))
    assert sorted(row[0][0] for batch in epoch for row in batch) == list(range(8))
    for batch in epoch:
        assert len(batch) == 1 or len(batch) * max(len(ids) for ids, _ in batch) <= 32


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    assert sft._schedule(0.0) == pytest.approx(1e-3)
    assert sft._schedule(0.03) == pytest.approx(1.0, abs=0.01)
    assert sft._schedule(1.0) == pytest.approx(0.1)
    assert sft._schedule(1.5) == pytest.approx(0.1)


@pytest.mark.slow
def test_the_loss_falls_on_a_toy_corpus_and_what_is_not_trained_is_not_learnt() -> None:
    rows = sft.encode_all(TOKENIZER, CORPUS, max_tokens=128)
    model = make_policy(TINY, TOKENIZER, seed=0)
    losses = sft.train(model, rows, TINY, LearnerSection(), seed=0)
    assert len(losses) == 40
    assert losses[0] < 1.05 * math.log(model.config.vocab_size)
    assert losses[-1] < 0.3
    ids, labels = (torch.tensor([column]) for column in rows[0])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    is_trained = labels[0, 1:] != sft.IGNORED
    assert -chosen[is_trained].mean() < 0.3
    assert -chosen[~is_trained].mean() > 2.0


def test_padding_and_company_do_not_change_the_loss() -> None:
    rows = sft.encode_all(TOKENIZER, CORPUS[:2], max_tokens=128)
    ids, labels, attention = sft._pad(rows, torch.device("cpu"))
    short = min(len(row) for row, _ in rows)
    assert attention.sum(1).tolist() == [len(row) for row, _ in rows]
    assert set(labels[1, short:].tolist()) == {sft.IGNORED}
    model = make_policy(TINY, TOKENIZER, seed=0).eval()
    with torch.no_grad():
        together = model(input_ids=ids, attention_mask=attention).logits[1, :short]
        alone = model(input_ids=ids[1:, :short]).logits[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_policy_from_nothing_is_written_where_it_can_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    records = [
        {
            "conversations": [
                {"from": "gpt" if m.is_agent else "human", "loss": m.is_trained, "value": m.text}
                for m in conversation.messages
            ]
        }
        for conversation in CORPUS
    ]
    path.write_text("\n".join(json.dumps(record) for record in records))
    cfg = RunConfig(sft=TINY, learner=LearnerSection(device="cpu"))
    cfg.sft.output = str(tmp_path / "policy")
    folder = sft.run(cfg, path)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    model = load_policy(str(folder), device=torch.device("cpu"), gradient_checkpointing=False)
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= len(tokenizer)


def test_no_conversation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no conversation"):
        sft.run(RunConfig(), path)
