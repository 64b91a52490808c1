"""WebArena's sites at their configured addresses, and the public names shown to agents."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from common.config.envs import WebarenaOptions
from envhub.tables import read_table
from envhub.web.site_tasks.addresses import PublicNames

_TABLE = read_table(__file__, "sites.yaml")
SITES: dict[str, dict[str, str]] = _TABLE["sites"]
ACCOUNT_SITES: list[str] = _TABLE["with_accounts"]


def check_urls(options: WebarenaOptions) -> list[str]:
    """Return a line with its remedy for each unusable address or login."""
    lines = []
    for name, url in options.sites.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            lines.append(f"envs.webarena.{name}={url!r} is not a URL such as http://host:7770")
    if options.auth_dir and not Path(options.auth_dir).is_dir():
        lines.append(f"envs.webarena.auth_dir={options.auth_dir!r} is not a folder")
    elif options.auth_dir:
        sites = [name for name in ACCOUNT_SITES if name in options.sites]
        lines += [
            f"envs.webarena.auth_dir lacks {name}_state.json, so tasks of {name} start logged out"
            for name in sites
            if not (Path(options.auth_dir) / f"{name}_state.json").is_file()
        ]
    return lines


def login_state(options: WebarenaOptions, sites: list[str]) -> str | None:
    """Return the cookie file of a task's accounts; None if there is none.

    The file of a task on two sites has both names, in alphabetical order.
    """
    if not options.auth_dir:
        return None
    accounts = sorted(site for site in sites if site in ACCOUNT_SITES)
    path = Path(options.auth_dir) / f"{'.'.join(accounts)}_state.json"
    return str(path) if accounts and path.is_file() else None


def public_names(sites: Mapping[str, str]) -> PublicNames:
    """Return the public names of the sites' addresses."""
    return PublicNames({url: SITES[name]["public"] for name, url in sites.items()})
