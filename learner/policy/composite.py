"""The language model of a checkpoint for images, videos or sound, loaded alone.

Transformers calls such a network a composite: a language model, its head, and towers for the other
senses. The learner builds the class of the composite and removes all but the language model and its
head. So the names of the weights, their conversion from the files and the forward pass on text are
those of the composite, and the towers never have memory.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from common.errors import ConfigError

_SOURCE = "composite_source"  # Attribute of a reduced network: the folder with all weights.
PLAIN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Attributes of a class that say which attention its layers compute.
_ATTENTION = ("_supports_sdpa", "_supports_attention_backend")


def composite_class(config: PretrainedConfig, path: str) -> type[PreTrainedModel] | None:
    """Return transformers' class of a composite, None for a network for text only.

    Raises: ConfigError: transformers has no such class.
    """
    if text_config(config) is config:
        return None
    name = (config.architectures or [""])[0]
    named = getattr(transformers, name, None)
    if not (isinstance(named, type) and issubclass(named, PreTrainedModel)):
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no class"
            f" {name or '(architectures is missing)'}, which config.json names for its sections."
            " Choose another model"
        )
    if not isinstance(config, named.config_class or PretrainedConfig):
        raise ConfigError(
            f"{path}: {name} in config.json is a network for text, and config.json has sections for"
            " other input. Write the class of the whole checkpoint as architectures"
        )
    return named


def text_config(config: PretrainedConfig) -> Any:
    """Return the section of a configuration for text; the configuration itself without one."""
    return config.get_text_config(decoder=True)


def reduce_to_text(model: PreTrainedModel, path: str) -> None:
    """Remove all modules and weights of a composite that are no part of its language model.

    Args:
        path: folder of the checkpoint with all weights.

    Raises: ConfigError: the composite has no language model with a head.
    """
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if not isinstance(decoder, PreTrainedModel) or decoder is model or head is None:
        raise ConfigError(
            f"{path}: transformers' {type(model).__name__} has no language model with a head that"
            " could be trained alone. Choose another model"
        )
    needed = [name for name in _required(model) if name != "input_ids"]
    if needed:
        raise ConfigError(
            f"{path}: transformers' {type(model).__name__} computes no text without"
            f" {', '.join(needed)}. Choose another model"
        )
    whole = {id(decoder), id(head)}
    _drop_others(model, whole, whole | {id(each) for each in decoder.modules()})
    around = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    for outer in (each for each in around if decoder in each.modules()):
        for name in _ATTENTION:  # The attention is that of the language model.
            setattr(outer, name, getattr(decoder, name))
    set_source(model, path)


def _required(model: PreTrainedModel) -> list[str]:
    """Return the arguments without a default of a network's forward pass."""
    arguments = inspect.signature(type(model).forward).parameters.values()
    names = [each.name for each in arguments if each.default is each.empty and each.kind in PLAIN]
    return names[1:]  # The first one is `self`.


def _drop_others(module: nn.Module, whole: set[int], inner: set[int]) -> None:
    """Remove what a module around the language model or its head has beside them."""
    for table in (module._parameters, module._buffers):
        table.update(dict.fromkeys(table))
    for name, child in module.named_children():
        if id(child) in whole:
            continue
        if any(id(each) in inner for each in child.modules()):
            _drop_others(child, whole, inner)
        else:
            is_network = isinstance(child, PreTrainedModel)
            setattr(module, name, _Removed(child.config) if is_network else None)


class _Removed(nn.Module):
    """Stands for a tower, without weights. Some forward passes read its settings for each input.

    That of Qwen2-Audio reads the device, also for a text.
    """

    device = torch.device("cpu")

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config = config

    def forward(self, *_: Any, **__: Any) -> Any:
        """Raise AttributeError: a text has no such input."""
        raise AttributeError(f"the tower of {type(self.config).__name__} is not loaded")


def set_source(model: PreTrainedModel, path: str) -> None:
    """Set the folder from which the checkpoints of a reduced network get all other weights."""
    setattr(model, _SOURCE, path)


def source_of(model: nn.Module) -> Path | None:
    """Return the folder with all weights of a reduced network; None for other networks."""
    path = getattr(model, _SOURCE, None)
    return None if path is None else Path(path)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the language model of a composite, reduced or whole; other networks are their own."""
    return model if text_config(model.config) is model.config else model.get_decoder()
