"""Token ids that stand for an image, a video or sound in the prompts of a composite model."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

CONFIG = "config.json"
KEY = re.compile(r"(image|video|audio|img|vision|speech)(_pad)?_token(_id|_index)")


def sense_tokens(config: Mapping[str, Any]) -> dict[int, str]:
    """Return id -> key of the tokens in a configuration that stand for other input than text.

    Example: {151655: "image_token_id", 151656: "video_token_id"} for Qwen2.5-VL.
    """
    return {
        value: key
        for key, value in config.items()
        if KEY.fullmatch(key) and type(value) is int and value >= 0
    }


def sense_tokens_in(folder: Path) -> dict[int, str]:
    """Return the tokens of the config.json in a folder; {} without a readable one."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return sense_tokens(cast(dict[str, Any], tree)) if isinstance(tree, dict) else {}
