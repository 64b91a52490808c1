"""Where the roles of a run are reached: the scheduler is found, and tells of all the others."""

import functools
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

import psutil

from common.errors import ConfigError, WireError
from common.host.loopback import loopback
from common.wire.join_messages import Directory, HubPlace

SAME_MACHINE = "*"  # host of an address: reached on whatever the scheduler is reached at
WILDCARDS = ("0.0.0.0", "::", SAME_MACHINE)


class Addresses(Protocol):
    """Whoever knows where roles listen."""

    def find_address(self, role: str) -> str | None:
        """Return where a role listens now, None if that is not known. Does not wait."""
        ...


class AddressBook:
    """What one role knows of where the others are. One thread writes, any may read.

    Example: the scheduler is found at tcp://10.0.0.1:5000 and tells of a learner at tcp://*:6000,
    on its own machine, so at tcp://10.0.0.1:6000. The learner starts again elsewhere and says
    hello there -> the next heartbeat brings another Directory, and every line follows.
    """

    def __init__(self, find_scheduler: Callable[[], str | None]) -> None:
        self._find_scheduler = find_scheduler
        self._directory = Directory(number=0, learner="", weights="", hubs=[])

    @property
    def number(self) -> int:
        """Of the directory that is known; 0: none."""
        return self._directory.number

    @property
    def is_complete(self) -> bool:
        """Whether all that an actor needs is known."""
        known = self._directory
        return bool(known.learner and known.weights and known.hubs)

    def take(self, directory: Directory) -> None:
        """Note what the scheduler tells. What a scheduler that restarted does not know yet stays.

        Raises: ConfigError: a role listens on a loopback address that cannot be reached from here.
        """
        before = self._directory
        self._directory = Directory(
            number=directory.number,
            learner=self._reachable("learner", directory.learner) or before.learner,
            weights=self._reachable("learner", directory.weights) or before.weights,
            hubs=self._reachable_hubs(directory.hubs) or before.hubs,
        )

    def forget_number(self) -> None:
        """Ask for the directory again: another scheduler counts anew."""
        known = self._directory
        self._directory = Directory(
            number=0, learner=known.learner, weights=known.weights, hubs=known.hubs
        )

    def find_address(self, role: str) -> str | None:
        """Return where a role listens now, None if that is not known. Does not wait."""
        known = {"learner": self._directory.learner, "weights": self._directory.weights}
        return self._find_scheduler() if role == "scheduler" else known[role] or None

    def hubs(self) -> list[HubPlace]:
        """Return the environment hubs of the run."""
        return self._directory.hubs

    def _reachable_hubs(self, told: list[HubPlace]) -> list[HubPlace]:
        """Return the hubs that this machine reaches. Raises: ConfigError: there are, but none."""
        places: list[HubPlace] = []
        unreachable: ConfigError | None = None
        for each in told:
            try:
                url = self._reachable("envhub", each.url)
                places.append(HubPlace(url=url, token=each.token, envs=each.envs))
            except ConfigError as error:
                unreachable = error
        if unreachable is not None and not places:
            raise unreachable
        return places

    def _reachable(self, section: str, address: str) -> str:
        """Return an address as it is reached from here."""
        if not address:
            return ""
        scheduler_host = host_of(self._find_scheduler() or "")
        host = host_of(address)
        if host in WILDCARDS:
            return with_host(address, scheduler_host)
        if is_loopback(host) and not is_here(scheduler_host):
            raise ConfigError(
                f"{section}.host={host}: cannot be reached from this machine; start the run with"
                f" {section}.host=0.0.0.0"
            )
        return address


def host_of(address: str) -> str:
    """Return the host of scheme://host:port, without brackets."""
    rest = address.partition("://")[2].partition("/")[0]
    return rest.rpartition(":")[0].strip("[]")


def with_host(address: str, host: str) -> str:
    """Return an address with another host."""
    scheme, _, rest = address.partition("://")
    end = rest[rest.rindex(":") :]
    return f"{scheme}://{bracketed(host)}{end}"


def bracketed(host: str) -> str:
    """Return a host as it is written before a port."""
    return f"[{host}]" if ":" in host else host


def advertised(address: str, *, towards: str) -> str:
    """Return the address by which others reach one that this process listens on.

    Who listens on all interfaces is told of by the one that reaches the scheduler at `towards`, or,
    on the scheduler's very machine, by "*".
    """
    if host_of(address) not in WILDCARDS:
        return address
    scheduler_host = host_of(towards)
    if is_here(scheduler_host):
        return with_host(address, SAME_MACHINE)
    return with_host(address, local_address_towards(scheduler_host))


@functools.lru_cache
def local_address_towards(host: str) -> str:
    """Return this machine's address on the interface that reaches `host`. Sends nothing.

    It is the one of the first call: while a link is down there is none.

    Raises: WireError: there is no way to the host.
    """
    try:
        family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WireError(f"no way to {host}: {error.strerror}") from error


@functools.lru_cache
def node_name(towards: str) -> str:
    """Return what to call this machine: its name, and not on the scheduler's own also its address.

    Args:
        towards: the address of the scheduler.
    """
    name, host = socket.gethostname(), host_of(towards)
    return name if is_here(host) else f"{name} ({local_address_towards(host)})"


def own_host_towards(host: str, peers: Iterable[str]) -> str:
    """Return by which host peers reach one that listens on `host`: on all interfaces, it depends.

    Args:
        peers: hosts of the peers on their interfaces towards here. One outside of this machine
            decides; of several outside networks, name the host that all of them reach.
    """
    if host not in WILDCARDS:
        return host
    outside = next((each for each in peers if not is_here(each)), "")
    return local_address_towards(outside) if outside else loopback()


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Return whether an address or a name is one of this machine's."""
    if not host or is_loopback(host) or host in WILDCARDS:
        return True
    try:
        found = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {each.address for many in psutil.net_if_addrs().values() for each in many}
    return bool(found & own) or all(is_loopback(str(each)) for each in found)
