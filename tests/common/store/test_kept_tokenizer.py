"""Laws of the tokenizer that a run keeps: every format of a model's folder is enough."""

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer

from common.config.load import load_config
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import keep_tokenizer
from learner.journal.texts import TokenTexts
from tests.actor.formats.trl_templates import byte_tokenizer, folder
from tools.exchange.writing import load_framing


def kept(tmp_path: Path, model: Path) -> Path:
    run_dir = RunDir(root=tmp_path / "r")
    cfg = load_config("smoke", [f"model.path={model}"])
    keep_tokenizer(cfg, run_dir)
    return run_dir.tokenizer


def test_tokenizer_files_are_kept_as_they_are(tmp_path: Path) -> None:
    tiny = ROOT / "configs" / "policies" / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (kept(tmp_path, tiny) / name).read_bytes() == (tiny / name).read_bytes()


def test_vocabulary_and_merges_are_kept_as_a_tokenizer(tmp_path: Path) -> None:
    template = (folder() / "qwen2_5.jinja").read_text(encoding="utf-8")
    own = byte_tokenizer(template, eos="<|im_end|>", special=["<|im_start|>", "<|im_end|>"])
    model = tmp_path / "model"
    own.save_pretrained(model)
    tree = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    (model / "vocab.json").write_text(json.dumps(tree["model"]["vocab"]), encoding="utf-8")
    (model / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    added = {
        str(each["id"]): {k: each[k] for k in each if k != "id"} for each in tree["added_tokens"]
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "pad_token": "<|im_end|>",
        "added_tokens_decoder": added,
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (model / "tokenizer.json").unlink()
    shutil.copyfile(ROOT / "configs/policies/tiny/config.json", model / "config.json")
    where = kept(tmp_path, model)
    read = AutoTokenizer.from_pretrained(where, local_files_only=True)
    ids = read.encode("go left<|im_end|>", add_special_tokens=False)
    assert read.decode(ids) == "go left<|im_end|>"
    assert "".join(TokenTexts(where / "tokenizer.json").texts(ids)) == "go left<|im_end|>"
    load_framing(where)
