"""Laws of `model.chat_template` and `model.chat_template_kwargs`."""

from dataclasses import replace
from pathlib import Path

import pytest

from actor.formats.renderer import Renderer
from common.config.load import load_config, load_received, sections_as_yaml
from common.errors import ConfigError
from common.formats import chat_template
from common.formats.chat_template import fix_prompts, fix_template, render_chat
from common.store.run_dir import RunDir
from common.store.run_start import keep_tokenizer, prepare, save_config
from scheduler.members.enrolment import SECRET, SECTIONS
from tests.actor.formats.trl_templates import byte_tokenizer, folder, tokenizer_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix }}{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def test_variables_reach_the_template() -> None:
    tokenizer = tokenizer_of("qwen3_5_think")
    prompts: list[str] = []
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        fix_template(None, variables)
        prompts.append(str(tokenizer.decode(Renderer(tokenizer).first_prompt("hi"))))
    thinks, empty, again = (each.rpartition("assistant\n")[2] for each in prompts)
    assert (thinks, empty, again) == ("<think>\n", "<think>\n\n</think>\n\n", "<think>\n")


def test_own_template_replaces_that_of_the_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text("\ufeff" + CHATML, encoding="utf-8")
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = byte_tokenizer("{{ bos_token }}", eos="<|im_end|>", special=special)
    with pytest.raises(ConfigError, match="drops the user's text"):
        Renderer(tokenizer)
    fix_template(path, {"prefix": "So: "})
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo: "
    assert tokenizer.decode(Renderer(tokenizer).first_prompt("hi")) == expected
    assert render_chat(tokenizer, USER) == expected
    tokenizer.chat_template = None  # A base model has none.
    assert render_chat(tokenizer, USER) == expected


def test_byte_order_mark_and_line_ends_change_no_prompt(tmp_path: Path) -> None:
    special = ["<|im_start|>", "<|im_end|>"]
    plain = byte_tokenizer(CHATML, eos="<|im_end|>", special=special)
    marked = byte_tokenizer("\ufeff" + CHATML, eos="<|im_end|>", special=special)
    expected = Renderer(plain).first_prompt("hi")
    assert Renderer(marked).first_prompt("hi") == expected
    assert chat_template.fingerprint(marked) == chat_template.fingerprint(plain)
    own = tmp_path / "own.jinja"
    own.write_bytes(("\ufeff" + CHATML).replace("<|im_end|>\n", "<|im_end|>\r\n").encode())
    fix_template(own, {})
    assert Renderer(plain).first_prompt("hi") == expected
    cfg = load_config("quickstart", [])
    cfg = replace(cfg, model=replace(cfg.model, chat_template=str(own)))
    run_dir = RunDir(root=tmp_path / "r")
    keep_tokenizer(cfg, run_dir)
    assert (run_dir.tokenizer / "chat_template.jinja").read_bytes() == CHATML.encode()


def test_unreadable_template_is_refused_by_key_and_path(tmp_path: Path) -> None:
    (tmp_path / "empty.jinja").write_text(" \n", encoding="utf-8")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe\xfa")
    for name, why in {
        "missing.jinja": "No such file",
        "empty.jinja": "the file is empty",
        "binary.jinja": "no text in UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=rf"^model\.chat_template=.*{name}: .*{why}"):
            fix_template(tmp_path / name, {})


def test_variables_keep_their_types_in_a_run(tmp_path: Path) -> None:
    given = ["enable_thinking=false", "effort=high", "depth=3", "names=[a,b]"]
    overrides = [f"model.chat_template_kwargs.{each}" for each in given]
    cfg = load_config("quickstart", overrides)
    expected = {"enable_thinking": False, "effort": "high", "depth": 3, "names": ["a", "b"]}
    assert cfg.model.chat_template_kwargs == expected
    save_config(cfg, tmp_path / "config.yaml")
    assert load_config(str(tmp_path / "config.yaml"), []).model == cfg.model
    received = load_received(
        sections_as_yaml(cfg, SECTIONS["actor"], without=SECRET), ["model.path=m"]
    )
    assert received.model.chat_template_kwargs == expected


def test_reserved_variable_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs\.tools=\[\]: is set by"):
        load_config("quickstart", ["model.chat_template_kwargs.tools=[]"])


def test_run_keeps_its_template_with_its_tokenizer(tmp_path: Path) -> None:
    cfg = load_config("quickstart", [])
    own = str(folder() / "qwen3.jinja")
    cfg = replace(cfg, model=replace(cfg.model, chat_template=own))
    run_dir = RunDir(root=tmp_path / "r")
    run_dir.root.mkdir()
    keep_tokenizer(cfg, run_dir)
    kept = run_dir.tokenizer / "chat_template.jinja"
    assert kept.read_text(encoding="utf-8") == Path(own).read_text(encoding="utf-8")
    fix_prompts(cfg.model)
    assert chat_template.template_of(object()) == Path(own).read_text(encoding="utf-8")


def test_resumed_run_must_have_the_same_prompts(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "r")
    cfg = load_config("quickstart", ["run.name=r"])
    save_config(cfg, run_dir.config)
    other = load_config("quickstart", ["run.name=r", "actor.keep_thinking=none"])
    with pytest.raises(ConfigError, match=r"actor\.keep_thinking: was all, now none"):
        prepare(other, run_dir)
    older = run_dir.config.read_text(encoding="utf-8").replace("keep_thinking: all", "")
    run_dir.config.write_text(older, encoding="utf-8")
    assert prepare(other, run_dir) is None  # A run of an earlier version lacks the key.
