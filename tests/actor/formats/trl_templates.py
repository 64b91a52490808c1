"""The chat templates in trl's wheel, each with a tokenizer of single bytes that has its tokens."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OF_DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# Special tokens as the templates write them. Tags of thoughts and calls are tokens, not special.
SPECIAL = re.compile(
    r"<\|[^|<>'\"\s]+\|>|<\uff5c[^\uff5c]+\uff5c>|</?s>|\[/?[A-Z_]+\]|</?(?:start|end)_of_turn>|<turn\|>|<\|turn>"
    r"|<\|(?:channel|tool_call|tool_response)>|<(?:channel|tool_call|tool_response)\|>|<sop>"
)
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
ENDS = (
    *("<|return|>", "<|im_end|>", "<|eot_id|>", "<|eot|>", OF_DEEPSEEK, "<end_of_turn>"),
    *("<|END_OF_TURN_TOKEN|>", "<turn|>", "<|end|>", "<|user|>"),
)
PICTURES = ("idefics3", "llava_next", "smolvlm")  # They show content only as a list of parts.


def folder() -> Path:
    """Return the folder of the templates in trl's wheel. The package itself is not imported."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl is not installed; `make setup` installs it"
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


def names() -> list[str]:
    """Return the names of the templates as the models have them, without trl's own variants."""
    found = sorted(each.stem for each in folder().glob("*.jinja"))
    return [each for each in found if not each.endswith("_training")]


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a template of trl's."""
    template = (folder() / f"{name}.jinja").read_text(encoding="utf-8")
    special = list(dict.fromkeys(SPECIAL.findall(template)))
    if name.startswith("deepseek"):
        special.append(OF_DEEPSEEK)
    eos = next((each for each in ENDS if each in special), "<|endoftext|>")
    return byte_tokenizer(template, eos=eos, special=special)


def byte_tokenizer(
    template: str, *, eos: str, special: list[str], named: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes.

    Args:
        special: tokens that are special in `added_tokens_decoder` alone, as in Gemma and Phi.
        named: special tokens that `all_special_ids` has as well.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    once = list(dict.fromkeys(["<bos>", eos, *named, *special]))
    own.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in once])
    plain = [AddedToken(each, special=False, normalized=False) for each in PLAIN]
    own.add_tokens(plain)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=own,
        bos_token="<bos>",
        eos_token=eos,
        additional_special_tokens=list(named),
    )
    fast.chat_template = template
    return fast
