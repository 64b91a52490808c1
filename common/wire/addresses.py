"""Addresses of the roles of a run. The scheduler is discovered and sends all other addresses."""

import functools
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

import psutil

from common.errors import ConfigError, WireError
from common.host.loopback import loopback
from common.wire.messages import Directory, HubPlace

SAME_MACHINE = "*"  # Host of an address that stands for the host of the scheduler.
WILDCARDS = ("0.0.0.0", "::", SAME_MACHINE)


class Addresses(Protocol):
    """A source of the addresses of roles."""

    def find_address(self, role: str) -> str | None:
        """Return the current address of a role, None if it is unknown. Does not wait."""
        ...


class AddressBook:
    """The addresses that one role has received. One thread writes, any thread may read.

    Example: the scheduler's address is tcp://10.0.0.1:5000. Its Directory has a learner at
    tcp://*:6000, which is on the same machine, so at tcp://10.0.0.1:6000. The learner restarts on
    another machine and registers. The answer to the next heartbeat is a new Directory, and every
    `FollowingDealer` reconnects.
    """

    def __init__(self, find_scheduler: Callable[[], str | None]) -> None:
        self._find_scheduler = find_scheduler
        self._directory = Directory(number=0, learner="", weights="", hubs=[])

    @property
    def number(self) -> int:
        """Number of the current directory; 0: none."""
        return self._directory.number

    @property
    def is_complete(self) -> bool:
        """Whether all addresses that an actor needs are known."""
        directory = self._directory
        return bool(directory.learner and directory.weights and directory.hubs)

    def take(self, directory: Directory) -> None:
        """Store a directory. An address that is missing in it keeps its previous value.

        A restarted scheduler sends incomplete directories until all roles have registered.

        Raises: ConfigError: a role listens on a loopback address of another machine.
        """
        before = self._directory
        self._directory = Directory(
            number=directory.number,
            learner=self._reachable("learner", directory.learner) or before.learner,
            weights=self._reachable("learner", directory.weights) or before.weights,
            hubs=self._reachable_hubs(directory.hubs) or before.hubs,
        )

    def forget_number(self) -> None:
        """Reset the number, so that a new scheduler sends its directory. Addresses are kept."""
        directory = self._directory
        self._directory = Directory(
            number=0, learner=directory.learner, weights=directory.weights, hubs=directory.hubs
        )

    def find_address(self, role: str) -> str | None:
        """Return the current address of a role, None if it is unknown. Does not wait."""
        addresses = {"learner": self._directory.learner, "weights": self._directory.weights}
        return self._find_scheduler() if role == "scheduler" else addresses[role] or None

    def hubs(self) -> list[HubPlace]:
        """Return the environment hubs of the run."""
        return self._directory.hubs

    def _reachable_hubs(self, reported: list[HubPlace]) -> list[HubPlace]:
        """Return the reachable hubs. Raises: ConfigError: there are hubs, but none is reachable."""
        places: list[HubPlace] = []
        unreachable: ConfigError | None = None
        for place in reported:
            try:
                url = self._reachable("envhub", place.url)
                places.append(HubPlace(url=url, token=place.token, envs=place.envs))
            except ConfigError as error:
                unreachable = error
        if unreachable is not None and not places:
            raise unreachable
        return places

    def _reachable(self, section: str, address: str) -> str:
        return reachable(section, address, scheduler=self._find_scheduler() or "")


def reachable(section: str, address: str, *, scheduler: str) -> str:
    """Return the form of a role's address under which this machine can reach it; "" for "".

    Args:
        section: section of the role's configuration.
        scheduler: the scheduler's address.

    Raises: ConfigError: the role listens on a loopback address of another machine.
    """
    if not address:
        return ""
    scheduler_host = host_of(scheduler)
    host = host_of(address)
    if host in WILDCARDS:
        return with_host(address, scheduler_host)
    if is_loopback(host) and not is_here(scheduler_host):
        raise ConfigError(
            f"{section}.host={host}: this machine cannot reach that address. Start the run"
            f" with {section}.host=0.0.0.0"
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
    """Return a host as written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def advertised(address: str, *, towards: str) -> str:
    """Return the address under which other roles can reach a listener of this process.

    The host of a listener on all interfaces is that of the interface towards the scheduler at
    `towards`. On the scheduler's machine it is "*".
    """
    if host_of(address) not in WILDCARDS:
        return address
    scheduler_host = host_of(towards)
    if is_here(scheduler_host):
        return with_host(address, SAME_MACHINE)
    return with_host(address, local_address_towards(scheduler_host))


@functools.lru_cache
def local_address_towards(host: str) -> str:
    """Return this machine's address on the interface that reaches `host`. Sends no packet.

    The result of the first call is cached, since there is no route while a link is down.

    Raises: WireError: there is no route to the host.
    """
    try:
        family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WireError(f"no network route to {host}: {error.strerror}") from error


@functools.lru_cache
def node_name(towards: str) -> str:
    """Return the host name of this machine, with its address if the scheduler is elsewhere.

    Args:
        towards: the address of the scheduler.
    """
    name = socket.gethostname()
    host = host_of(towards)
    return name if is_here(host) else f"{name} ({local_address_towards(host)})"


def own_host_towards(host: str, peers: Iterable[str]) -> str:
    """Return the host under which peers reach a listener on `host`.

    For a listener on all interfaces it is the address towards the first peer on another machine.
    Without such a peer it is the loopback address. If peers are in several networks, `host` must
    be an address that all of them reach.

    Args:
        peers: addresses of the peers on their interfaces towards this machine.
    """
    if host not in WILDCARDS:
        return host
    outside = next((each for each in peers if not is_here(each)), "")
    return local_address_towards(outside) if outside else loopback()


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_here(host: str) -> bool:
    """Return whether an address or a host name belongs to this machine."""
    if not host or is_loopback(host) or host in WILDCARDS:
        return True
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    local = {each.address for many in psutil.net_if_addrs().values() for each in many}
    return bool(addresses & local) or all(is_loopback(str(each)) for each in addresses)
