"""The section `model`: the checkpoint of the policy, its data type and its chat template."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from common.config.knobs import DATE, PATH, Contradiction, knob

BLOCK_NUMBERS = 64  # Numbers of a quantised weight that share a scale.
DTYPES = ("bfloat16", "float16", "float32")
# Arguments of `apply_chat_template` that are no variables of a template.
RESERVED_VARIABLES = {
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "strftime_now",
    "date_string",
}


class BaseFormat(StrEnum):
    """Number format of the frozen weights beside adapters in the learner's memory.

    full: model.dtype on a GPU, and fp32 on a CPU. int8: 8 bits. nf4: 4 bits (QLoRA,
    arXiv:2305.14314). In both, each block of 64 numbers has a scale in bf16. The linear layers are
    quantised; tables, head and norms are not. The start rounds the checkpoint to these numbers once
    and stores it in model.cache_folder, so the engines compute with the same weights.
    """

    FULL = "full"
    INT8 = "int8"
    NF4 = "nf4"

    @property
    def weight_bytes(self) -> float:
        """Bytes of a quantised weight with its share of a scale."""
        return {"int8": 1.0, "nf4": 0.5}[self.value] + 2 / BLOCK_NUMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The policy: a directory with a transformers checkpoint."""

    path: str = knob(
        MISSING,
        "Selects the checkpoint: a directory with config.json, weights and tokenizer, or a model's "
        "name, org/name or org/name@revision. A name is resolved to a commit once, at the start. "
        "Also a .gguf file, or a directory with one model in GGUF files. Quantised weights (GGUF, "
        "MXFP4, FP8, compressed-tensors, bitsandbytes) are dequantised once into "
        "model.cache_folder, as float32 for model.dtype=float32 and as bfloat16 otherwise. A "
        "checkpoint for images or sound gives its language model; the rest passes through.",
        form=PATH,
    )
    source: str = knob(
        "", "Names the model and its commit if model.path was given as a name. The start sets it."
    )
    quantised: str = knob(
        "",
        "Names the quantised checkpoint whose weights model.path has, dequantised. The start sets "
        "it.",
    )
    cache_folder: str = knob(
        "",
        "Selects the folder for dequantised weights. Empty means longstride/dequantised in "
        "XDG_CACHE_HOME.",
        form=PATH,
        also="",
    )
    commits: dict[str, str] = knob(
        {}, "Maps each name of a model to the commit that the run uses. The start sets it."
    )
    architecture: str = knob(
        "",
        "Selects a config.json, by directory or org/name, for the memory plan without model.path.",
        form=PATH,
        also="",
    )
    dtype: str = knob(
        "bfloat16", "Sets the data type of the engine and of published weights.", one_of=DTYPES
    )
    base: BaseFormat = knob(
        BaseFormat.FULL,
        "Selects the number format of the frozen weights beside adapters in the learner's memory.",
    )
    date: str = knob(
        "",
        "Sets the date in prompts, as YYYY-MM-DD. Empty means the date of the first start.",
        form=DATE,
        also="",
    )
    chat_template: str = knob(
        "",
        "Selects a file with a chat template. Empty uses the tokenizer's own.",
        form=PATH,
        also="",
    )
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "Sets variables of the chat template, such as enable_thinking: false."
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.base is not BaseFormat.FULL and self.dtype == "float16":
            law = "must be full with model.dtype=float16, which lacks numbers of bf16"
            yield "base", self.base.value, law
        for name in sorted(RESERVED_VARIABLES & self.chat_template_kwargs.keys()):
            law = "is set by the product; remove it"
            yield f"chat_template_kwargs.{name}", self.chat_template_kwargs[name], law

    @property
    def label(self) -> str:
        """Short name of the model: its repository, or the name of its folder or file."""
        return self.source.partition("@")[0] or Path(self.quantised or self.path).name
