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
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
