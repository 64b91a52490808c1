"""Selects the mode of Weights & Biases from the configuration and the environment."""

import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from common.config.log import LogSection, WandbMode
from common.errors import ConfigError

logger = logging.getLogger(__name__)

_DEFAULT_URL = "https://api.wandb.ai"
MODES = {  # Values of WANDB_MODE that wandb accepts, case-insensitive.
    "": None,
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "shared": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.DISABLED,
}
YES = ("true", "1", "yes", "on", "y", "t")
NO = ("", "false", "0", "no", "off", "n", "f")


def choose_mode(cfg: LogSection, environ: Mapping[str, str]) -> WandbMode:
    """Return the mode to open: never AUTO, and ONLINE only with an account.

    wandb therefore never prompts for a login. WANDB_MODE and WANDB_DISABLED decide for `auto`.

    Raises: ConfigError: one of these variables has an unknown value; names it.
    """
    requested = _requested_mode(environ) if cfg.wandb is WandbMode.AUTO else cfg.wandb
    if requested is WandbMode.DISABLED or requested is WandbMode.OFFLINE:
        return requested
    if has_account(environ):
        return WandbMode.ONLINE
    if requested is WandbMode.ONLINE:
        logger.warning("wandb is offline: no account is logged in. Run `wandb login` to go online")
    return WandbMode.OFFLINE


def check_mode(cfg: LogSection, environ: Mapping[str, str]) -> None:
    """Check the variables of the environment. Raises: ConfigError: as in `choose_mode`."""
    if cfg.wandb is WandbMode.AUTO:
        _requested_mode(environ)


def _requested_mode(environ: Mapping[str, str]) -> WandbMode | None:
    """Return the mode that the environment requests, None if it has no request.

    Raises: ConfigError.
    """
    is_off = environ.get("WANDB_DISABLED", "")
    if is_off.strip().lower() in YES:
        return WandbMode.DISABLED
    if is_off.strip().lower() not in NO:
        raise ConfigError(f"WANDB_DISABLED={is_off}: must be true or false, or unset")
    named = environ.get("WANDB_MODE", "")
    if named.strip().lower() not in MODES:
        known = ", ".join(name for name in MODES if name)
        raise ConfigError(f"WANDB_MODE={named}: must be one of {known}, or unset")
    return MODES[named.strip().lower()]


def has_account(environ: Mapping[str, str]) -> bool:
    """Return whether wandb would find an API key in the environment or in the netrc file."""
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_URL).netloc
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if entry is not None and entry[2]:
            return True
    return False
