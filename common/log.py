"""Logging of a role: one line per event, to the terminal's stderr or the role's log file."""

import logging
import os

FORMAT = "%(asctime)s %(levelname).1s {role} %(name)s: %(message)s"


def configure_logging(role: str, level: str) -> None:
    """Send this process's log to stderr (the launcher points it at `logs/<role>.log`).

    Libraries that chat are held at WARNING.
    """
    logging.basicConfig(level=level, format=FORMAT.format(role=role), force=True)
    for noisy in ("asyncio", "aiohttp", "httpx", "urllib3", "matplotlib", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # transformers imports torchao, which warns of CUDA's kernels and of torch's own changes.
    for warning in ("torchao", "torch.utils._pytree"):
        logging.getLogger(warning).setLevel(logging.ERROR)
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
