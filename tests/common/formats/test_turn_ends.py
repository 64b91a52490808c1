"""Laws of the ends of a turn: from the template, the tokenizer and generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actor.formats.renderer import Renderer
from common.errors import ConfigError
from common.formats.turn_ends import TurnEnd, configured_ends, find_end
from tests.actor.formats.trl_templates import byte_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eom|>"]


def folder_with(path: Path, ends: object, *, template: str = CHATML) -> Path:
    byte_tokenizer(template, eos="<|endoftext|>", special=SPECIAL).save_pretrained(path)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends}), encoding="utf-8"
    )
    return path


def names_of(path: Path) -> list[str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return tokenizer.convert_ids_to_tokens(Renderer(tokenizer).end_of_turn_ids)


def test_ends_of_generation_config_end_a_turn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML, eos="<|endoftext|>", special=SPECIAL)
    _, end, eos, other = map(tokenizer.get_vocab().__getitem__, SPECIAL)
    own = ["<|im_end|>", "<|endoftext|>"]
    cases: list[tuple[object, list[str]]] = [
        (None, own),
        (end, own),
        ([eos, other, end], [*own, "<|eom|>"]),
        ([], own),
    ]
    for number, (ends, named) in enumerate(cases):
        assert names_of(folder_with(tmp_path / f"{number}", ends)) == named


@pytest.mark.parametrize("ends", ["7", [True], [1.5], {"a": 1}])
def test_malformed_end_is_refused_by_file_and_value(tmp_path: Path, ends: object) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder_with(tmp_path, ends), local_files_only=True)
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id=.* a token id"):
        configured_ends(tokenizer)


def test_end_is_the_run_that_all_answers_share() -> None:
    def end_of(after: list[int], last: list[int]) -> TurnEnd | None:
        return find_end(after, last, {7, 8, 9}, lambda each: each == 0)

    assert end_of([7, 0, 9, 1], [7, 0]) == TurnEnd(lead=[], run=[7], last=[7])
    assert end_of([7, 8, 9, 1], [7, 8]) == TurnEnd(lead=[], run=[7, 8], last=[7])
    assert end_of([7, 9, 1], [8]) == TurnEnd(lead=[], run=[7], last=[8])
    assert end_of([0, 7, 1], []) == TurnEnd(lead=[0], run=[7], last=[])
    assert end_of([1, 7], [7]) is None
    assert end_of([], []) is None


def test_token_inside_answers_ends_no_turn() -> None:
    # The answer's own part ends with 7, the turn with 9.
    found = find_end([7, 1, 9, 2], [7, 1, 9], {7, 8, 9}, lambda each: each == 0, {7})
    assert found == TurnEnd(lead=[7, 1], run=[9], last=[9])
    # The template has no other end: 7 stays the end of a turn in the context.
    found = find_end([7, 2], [8], {7, 8}, lambda each: each == 0, {7})
    assert found == TurnEnd(lead=[], run=[7], last=[8])


def test_tokens_of_an_end_are_counted_once() -> None:
    own = TurnEnd(lead=[0], run=[7, 8], last=[6])
    told = {None: 2, 7: 2, 8: 3, 6: 3, 5: 0}  # Sampled end -> tokens that need not be inserted.
    assert {end: own.num_sampled(end, is_stopped=True) for end in told} == told
    assert own.num_sampled(7, is_stopped=False) == 0
