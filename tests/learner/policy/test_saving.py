"""Laws of written checkpoints: files as they came, and names that transformers 4 and 5 know."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, Gemma4ForCausalLM, Gemma4TextConfig

from common.formats.chat_template import fix_template
from common.repository import ROOT
from learner.policy.model import load_policy
from learner.policy.saving import rope_of_4, save_model, save_tokenizer
from tests.venvs import python_with
from tools.offline.scratch import make_tokenizer, save_policy

TINY = ROOT / "configs" / "policies" / "tiny"
OF_4 = """
import json, sys
from transformers import AutoConfig, AutoTokenizer
config = AutoConfig.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "hi"}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
print(json.dumps([config.rope_theta, tokenizer.encode(text, add_special_tokens=False)]))
"""


def saved(source: Path, folder: Path) -> Path:
    model = load_policy(str(source), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    return save_policy(folder, model, tokenizer)


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "source"))


@pytest.mark.parametrize(
    ("rope", "keys"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
        (
            {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
        (
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
        ),
        (None, {}),
    ],
)
def test_rope_is_written_in_the_notation_of_transformers_4(rope: object, keys: object) -> None:
    assert rope_of_4({"rope_parameters": rope}) == keys


def test_both_notations_of_rope_are_read_as_one(tmp_path: Path) -> None:
    source = copied(tmp_path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    own = {**config, "rope_parameters": rope}
    own.pop("rope_theta", None)
    (source / "config.json").write_text(json.dumps(own), encoding="utf-8")
    read = AutoConfig.from_pretrained(saved(source, tmp_path / "out"), local_files_only=True)
    assert read.rope_parameters == rope


def test_refused_generation_config_is_kept_as_it_came(tmp_path: Path) -> None:
    source = copied(tmp_path)
    path = source / "generation_config.json"
    text = json.dumps({"do_sample": False, "temperature": 0.7, "eos_token_id": [3, 2]})
    path.write_text(text, encoding="utf-8")
    folder = saved(source, tmp_path / "out")
    assert (folder / "generation_config.json").read_text(encoding="utf-8") == text
    load_policy(str(folder), device="cpu")


def test_tokenizer_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    source = copied(tmp_path)
    (source / "special_tokens_map.json").write_text('{ "eos_token": "<|end|>" }', encoding="utf-8")
    folder = saved(source, tmp_path / "out")
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    for name in (*names, "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


def test_checkpoint_has_the_chat_template_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("{{ messages[0]['content'] }}<|end|>", encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    folder = tmp_path / "out"
    folder.mkdir()
    try:
        fix_template(path, {})
        save_tokenizer(folder, tokenizer)
    finally:
        fix_template(None, {})
    read = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert read.chat_template == path.read_text(encoding="utf-8")


@pytest.mark.long
@pytest.mark.slow
def test_checkpoints_are_read_by_transformers_4(tmp_path: Path) -> None:
    python = python_with("transformers==4.57.*", "jinja2", "numpy")
    made = tmp_path / "made"
    made.mkdir()
    save_tokenizer(made, make_tokenizer(["go left"] * 8, vocab_size=300))
    shutil.copyfile(TINY / "config.json", made / "config.json")
    for folder in (saved(TINY, tmp_path / "out"), made):
        done = subprocess.run(
            [python, "-c", OF_4, str(folder)], capture_output=True, encoding="utf-8", timeout=120
        )
        assert done.returncode == 0, done.stderr[-2_000:]
        theta, ids = json.loads(done.stdout)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        chat = [{"role": "user", "content": "hi"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert (theta, ids) == (1e4, tokenizer.encode(text, add_special_tokens=False))


def test_rope_by_layer_kind_is_kept_in_checkpoints(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"vocab_size": 64, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    layers = ["sliding_attention", "full_attention"]
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, layer_types=layers))
    save_model(tmp_path, model, model.state_dict())
    read: Any = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    # Keys of transformers 4 would leave the kind "proportional" without its own base.
    assert read.rope_parameters["full_attention"]["rope_type"] == "proportional"
    assert read.rope_parameters == model.config.rope_parameters
