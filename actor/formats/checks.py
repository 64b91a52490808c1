"""Checks of a model's tokenizer before the start; an actor makes the same ones."""

from pathlib import Path
from typing import Any

from actor.formats.tools import load_renderer, make_renderer
from actor.rollout.render import Renderer
from common.config.evaluation import AgentFormat
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.formats.chat_template import fix_prompts


def check_rendering(cfg: RunConfig, root: Path) -> None:
    """Check that the chat template at `model.path` is usable, and that a page fits beside a turn.

    A folder without `tokenizer.json` is left to the actor.

    Raises: ConfigError: the template or `actor.max_model_len` cannot be used.
    """
    fix_prompts(cfg.model, root)
    folder = root / cfg.model.path
    if (folder / "tokenizer.json").is_file():
        renderer_of(folder, cfg.actor.format).check_room(cfg.actor)


def renderer_of(folder: Path, kind: AgentFormat) -> Renderer:
    """Return the renderer of a folder, without the tokenizer's own class where that is enough.

    Raises: ConfigError: the chat template cannot be used.
    """
    try:
        return make_renderer(_load_quickly(folder), kind)
    except ConfigError:  # The tokenizer's own class decides. It takes seconds to load.
        return load_renderer(folder, kind)


def _load_quickly(folder: Path) -> Any:
    """Return the tokenizer without its own class, which would load torch."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers warns about the different class.
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    finally:
        logging.set_verbosity(before)
