"""Checks of a model's tokenizer before the start; an actor makes the same ones."""

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from actor.formats.renderer import Renderer
from actor.formats.tools import load_renderer, make_renderer
from actor.rollout.context import Room
from actor.rollout.episode import first_text, opening
from actor.rollout.folding import history_of
from common.config.actor import AgentFormat
from common.config.run_config import RunConfig
from common.errors import ConfigError, EnvError
from common.formats.answers import tools_instruction, worded
from common.formats.chat_template import fix_prompts
from common.formats.turns import FirstPrompt
from common.repository import ROOT
from common.text import counted

logger = logging.getLogger(__name__)

FRAME_TOKENS = 64  # Tokens of a chat template around a further message, at most.


def check_rendering(cfg: RunConfig) -> None:
    """Check that the chat template at `model.path` is usable, and that a page fits beside a turn.

    A folder without `tokenizer.json` is left to the actor.

    Raises: ConfigError: the template or `actor.max_model_len` cannot be used.
    """
    fix_prompts(cfg.model)
    folder = ROOT / cfg.model.path
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


def check_prompts(cfg: RunConfig, prompts: Iterable[FirstPrompt]) -> str:
    """Check that first prompts fit into the context; return a sentence about their lengths.

    Short prompts are not encoded, except for the first one, because a token has at least one byte.
    Without a tokenizer at `model.path` the result is "".

    Raises: ConfigError: a prompt does not fit, or the chat template refuses it.
    """
    folder = ROOT / cfg.model.path
    if not (folder / "tokenizer.json").is_file():
        return ""
    fix_prompts(cfg.model)
    renderer = renderer_of(folder, cfg.actor.format)
    actor = cfg.actor
    room = Room(max_tokens=actor.max_model_len, turn_tokens=actor.max_turn_tokens, options=actor)
    most = history_of(renderer, room).first_room
    num = 0
    too_long: dict[str, tuple[FirstPrompt, int]] = {}
    shapes = set[str]()
    for num, prompt in enumerate(prompts, 1):
        # A renderer of tools measures the template, which takes longer than the prompts of others.
        is_close = num == 1 or not prompt.has_own_tools or _tools_bytes(prompt) > most // 2
        render = renderer.of(prompt.env, prompt.tools if is_close else ())
        if (shape := _shape_of(prompt)) not in shapes:
            shapes.add(shape)
            _check_shown(render, prompt)
        text, encode = _opening(cfg, render, prompt)
        frame = len(render.first_prompt("x")) + FRAME_TOKENS * len(prompt.messages)
        num_bytes = len(text.encode()) + len(prompt.text.encode())
        num_bytes += _tools_bytes(prompt) if prompt.has_own_tools else 0
        if num > 1 and num_bytes + frame <= most:
            continue
        if not is_close:
            render = renderer.of(prompt.env, prompt.tools)
            text, encode = _opening(cfg, render, prompt)
        try:
            num_tokens = len(history_of(render, room).demanding(encode)(text))
        except EnvError as error:
            raise ConfigError(f"{prompt.place}: {error}") from error
        if num_tokens > most:
            too_long[prompt.place] = (prompt, num_tokens)
    if refused := {k: each for k, each in too_long.items() if not each[0].may_be_cut}:
        raise ConfigError(_too_long(cfg, folder, list(refused.values()), num=num, most=most))
    for prompt, num_tokens in too_long.values():
        logger.warning(
            "the first observation of %s has %d tokens and is cut to %d, with the mark [cut here]:"
            " raise actor.max_model_len=%d",
            *(prompt.place, num_tokens, most, actor.max_model_len),
        )
    return f"{counted(num, 'first prompt')} within {most} tokens" if not too_long else ""


def _shape_of(prompt: FirstPrompt) -> str:
    """Return the roles of the messages before the last, and which of their fields are set."""
    parts = [
        [message["role"], bool(message["content"]), len(message.get("tool_calls", []))]
        for message in prompt.messages[:-1]
    ]
    return json.dumps(parts)


def _check_shown(render: Renderer, prompt: FirstPrompt) -> None:
    """Check that the chat template shows each message. Raises: ConfigError: it drops one."""
    if len(prompt.messages) > 1:
        try:
            render.check_shown(prompt.messages[:-1])
        except ValueError as error:
            raise ConfigError(f"{prompt.place}: {error}") from error


def _tools_bytes(prompt: FirstPrompt) -> int:
    """Return an upper bound of the bytes with which a prompt shows its tools."""
    return 2 * len(json.dumps(list(prompt.tools)))


def _instruction(prompt: FirstPrompt) -> str:
    """Return the text before the first observation, with the tools of the item."""
    of_record = tools_instruction(prompt.tools) if prompt.has_own_tools else ""
    return first_text(of_record, prompt.instruction) if of_record else prompt.instruction


def _opening(
    cfg: RunConfig, render: Renderer, prompt: FirstPrompt
) -> tuple[str, Callable[[str], list[int]]]:
    """Return the message with the first observation, and its encoder."""
    return opening(
        render,
        str(prompt.messages[-1]["content"]),
        messages=prompt.messages[:-1],
        instruction=worded(cfg.actor.format, _instruction(prompt)),
        acknowledgement=prompt.acknowledgement,
    )


def _too_long(
    cfg: RunConfig, folder: Path, prompts: list[tuple[FirstPrompt, int]], *, num: int, most: int
) -> str:
    """Return the error about prompts that do not fit, with the remedies."""
    from tokenizers import Tokenizer

    actor = cfg.actor
    place, longest = max(((each.place, tokens) for each, tokens in prompts), key=lambda e: e[1])
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    lengths = [len(encode(each.text).ids) for each, _ in prompts]
    text = (
        f"actor.max_model_len={actor.max_model_len}: {len(prompts)} of"
        f" {counted(num, 'first prompt')} have more than the {most} tokens that fit beside a turn"
        f" of actor.max_turn_tokens={actor.max_turn_tokens}; {place} has {longest}. Use"
        f" actor.max_model_len={longest + actor.max_model_len - most}"
    )
    if min(lengths) > 1:
        tokenizer = cfg.model.path
        remedy = f"data.max_length={min(lengths) - 1} data.tokenizer={tokenizer}"
        text += f", or leave these records out with {remedy}"
    return text
