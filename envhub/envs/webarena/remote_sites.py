"""WebArena's sites at the addresses of the configuration, and the names that agents see instead."""

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
    """Return a line for each address or login that cannot be used, with its remedy."""
    lines = []
    for name, url in options.sites.items():
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            lines.append(f"envs.webarena.{name}={url!r} is no address such as http://host:7770")
    if options.auth_dir and not Path(options.auth_dir).is_dir():
        lines.append(f"envs.webarena.auth_dir={options.auth_dir!r} is no folder")
    elif options.auth_dir:
        sites = [name for name in ACCOUNT_SITES if name in options.sites]
        lines += [
            f"envs.webarena.auth_dir lacks {name}_state.json: tasks of {name} start logged out"
            for name in sites
            if not (Path(options.auth_dir) / f"{name}_state.json").is_file()
        ]
    return lines


def login_state(options: WebarenaOptions, sites: list[str]) -> str | None:
    """Return the file with the cookies of a task's accounts; None when there is none.

    WebArena names the file of a task on two sites after both, in the order of the alphabet.
    """
    if not options.auth_dir:
        return None
    accounts = sorted(site for site in sites if site in ACCOUNT_SITES)
    path = Path(options.auth_dir) / f"{'.'.join(accounts)}_state.json"
    return str(path) if accounts and path.is_file() else None


def public_names(sites: Mapping[str, str]) -> PublicNames:
    """Return what agents see for the addresses of the sites."""
    return PublicNames({url: SITES[name]["public"] for name, url in sites.items()})
