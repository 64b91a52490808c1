"""Laws of tokens that stand for images: a prompt that has one is refused with its name."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from actor.formats.renderer import Renderer
from common.formats.sense_tokens import sense_tokens, sense_tokens_in
from tools.offline.scratch import make_tokenizer

IMAGE = 7  # The token of a byte, which stands for an image in this model.


def renderer_of(folder: Path, *, template: str = "") -> Renderer:
    tokenizer = make_tokenizer(["go to the red ball"], vocab_size=320)
    if template:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    config = {"image_token_id": IMAGE, "vision_start_token_id": 9, "image_size": 28}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Renderer(AutoTokenizer.from_pretrained(folder, local_files_only=True))


def test_only_placeholders_stand_for_other_input() -> None:
    config = {
        "image_token_index": 5,
        "video_token_id": 6,
        "audio_token_id": None,
        "boi_token_index": 8,
        "vision_end_token_id": 9,
        "eos_token_id": 2,
    }
    assert sense_tokens(config) == {5: "image_token_index", 6: "video_token_id"}


def test_damaged_config_has_no_such_token(tmp_path: Path) -> None:
    assert sense_tokens_in(tmp_path) == {}
    (tmp_path / "config.json").write_text("[1", encoding="utf-8")
    assert sense_tokens_in(tmp_path) == {}


def test_prompt_with_an_image_is_refused_by_name(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    name = repr(renderer.shown([IMAGE]))
    problem = renderer.sense_problem([30, IMAGE, 31])
    assert f"the token {name} (image_token_id=7 in config.json)" in problem
    assert renderer.sense_problem([30, 31, 9]) == ""


def test_template_that_writes_an_image_is_refused(tmp_path: Path) -> None:
    letter = renderer_of(tmp_path / "plain").shown([IMAGE])
    template = (
        "{%- for message in messages -%}<|user|>{{ message['content'] }}"
        "{%- if message['content'] == 'picture' -%}" + letter + "{%- endif -%}<|end|>"
        "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
    )
    renderer = renderer_of(tmp_path / "images", template=template)
    assert renderer.of_messages([{"role": "user", "content": "go"}])
    with pytest.raises(ValueError, match=r"writes other input than text: .*image_token_id=7"):
        renderer.of_messages([{"role": "user", "content": "picture"}])
