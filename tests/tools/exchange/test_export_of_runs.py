"""Laws of exports of a run with its own prompt settings: they are read as the same tokens."""

import json
from pathlib import Path
from typing import Any

import run
from actor.formats.renderer import Renderer
from common.config.load import load_config
from common.formats import chat_template
from common.formats.chat_template import fix_template
from common.store.run_dir import RunDir
from common.store.run_start import keep_tokenizer, save_config
from learner.journal.journal import JournalWriter
from tests.actor.formats.trl_templates import byte_tokenizer
from tests.tools.exchange.test_round_trip import of_tokens
from tools.offline.rows import read_rows

# Qwen3's switch: an empty block of thoughts in the prompt. The variable `mode` changes the head.
SWITCH = (
    "<|head|>{{ mode | default('plain') }}\n"
    "{% for m in messages %}<|head|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
VARIABLES = {"enable_thinking": False, "mode": "short"}
TEXTS = ["Which way?", "go left", "a wall", "open it"]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def played(tokenizer: Any, end: int) -> tuple[list[int], list[int]]:
    """Return tokens and mask of a rollout whose answers end with a token."""
    render = Renderer(tokenizer)
    one, two = ([*ids_of(tokenizer, text), end] for text in TEXTS[1::2])
    first = render.first_prompt(TEXTS[0])
    after = render.after_action(TEXTS[2], is_stopped=True, end=end)
    mask = [0] * len(first) + [1] * len(one) + [0] * len(after) + [1] * len(two)
    return [*first, *one, *after, *two], mask


def exported(tmp_path: Path, model: Path, parts: tuple[list[int], list[int]], *more: str) -> Path:
    """Return the file of a run's export whose settings were given on the command line."""
    run_dir = RunDir(root=tmp_path / "r")
    cfg = load_config("smoke", [f"model.path={model}", *more])
    save_config(cfg, run_dir.config)
    keep_tokenizer(cfg, run_dir)
    writer = JournalWriter(run_dir.journal)
    writer.append(of_tokens(*parts))
    writer.close()
    path = tmp_path / "out.jsonl"
    chat_template._process = chat_template._Process()  # as in another process
    command = ["journal", str(run_dir.root), "export", f"to={path}", "--format", "sft"]
    assert run.main(command) == 0
    return path


def test_export_has_the_variables_of_its_run(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(SWITCH, eos="<|end|>", special=["<|head|>"])
    model = tmp_path / "model"
    tokenizer.save_pretrained(model)
    fix_template(None, VARIABLES)
    end = tokenizer.eos_token_id
    assert isinstance(end, int)
    ids, mask = played(tokenizer, end)
    assert "short\n" in tokenizer.decode(ids)
    assert tokenizer.decode(ids).count("</think>") == 2
    given = [f"model.chat_template_kwargs.{name}={value}" for name, value in VARIABLES.items()]
    path = exported(tmp_path, model, (ids, mask), *given)
    (record,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert [each["content"] for each in record["messages"]] == TEXTS
    fix_template(None, VARIABLES)
    (row,) = read_rows(path, tokenizer=tokenizer, max_tokens=1000, key="k")
    assert (row.token_ids.tolist(), row.mask.astype(int).tolist()) == (ids, mask)


def test_export_knows_the_configured_ends_of_turns(tmp_path: Path) -> None:
    model = tmp_path / "model"
    byte_tokenizer(SWITCH, eos="<|end|>", special=["<|head|>", "<|stop|>"]).save_pretrained(model)
    own = byte_tokenizer(SWITCH, eos="<|end|>", special=["<|head|>", "<|stop|>"])
    (stop,) = ids_of(own, "<|stop|>")
    settings = {"eos_token_id": [own.eos_token_id, stop]}
    (model / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    own.name_or_path = str(model)
    path = exported(tmp_path, model, played(own, stop))
    (record,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert [each["content"] for each in record["messages"]] == TEXTS
