"""Laws of the conversation that `--dry-run` and `doctor` show."""

from dataclasses import replace
from pathlib import Path

from common.config.load import load_config
from common.config.run_config import RunConfig
from tests.actor.formats.trl_templates import tokenizer_of
from tools.checks.preview import preview_lines


def with_model(path: Path | str) -> RunConfig:
    cfg = load_config("quickstart", [])
    return replace(cfg, model=replace(cfg.model, path=str(path)))


def test_preview_shows_a_call_with_special_tokens(tmp_path: Path) -> None:
    tokenizer_of("qwen3_5_think").save_pretrained(tmp_path)
    lines = preview_lines(with_model(tmp_path))
    assert lines[0] == "prompts: two turns with a tool call, as the policy receives them:"
    shown = "\n".join(each.removeprefix("  | ") for each in lines[1:-2])
    _, _, turns = shown.partition("<|im_start|>user\n")
    assert turns == (
        "You see a door.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n"
        "<function=maze>\n<parameter=action>\nopen the door\n</parameter>\n</function>\n"
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nThe door is open.\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert lines[-2:] == [
        "prompts: a turn ends with <|im_end|>",
        "prompts: thoughts are <think> ... </think>",
    ]


def test_preview_names_the_reason_of_a_template_without_tools(tmp_path: Path) -> None:
    tokenizer_of("gemma3").save_pretrained(tmp_path)
    head, *lines = preview_lines(with_model(tmp_path))
    assert "without a tool call" in head
    assert "Conversation roles must alternate" in head
    assert "  | <bos><start_of_turn>user" in lines
    tokenizer_of("smolvlm").save_pretrained(tmp_path / "other")
    (line,) = preview_lines(with_model(tmp_path / "other"))
    assert line.startswith("prompts: model.path: the chat template drops the user's text")
    assert preview_lines(with_model(tmp_path / "none")) == []
