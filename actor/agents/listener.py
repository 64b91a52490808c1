"""The address at which agents reach an actor: this machine, or other machines and containers."""

import logging
import socket
import ssl
from dataclasses import dataclass

from common.config.actor import PORT, AgentServerOptions
from common.errors import ConfigError, WireError
from common.host.loopback import IPV4, IPV6, can_bind, loopback
from common.wire.addresses import WILDCARDS, bracketed, is_loopback, local_address_towards

UNENCRYPTED = (  # Warning about a listener for other machines; the argument is its host.
    "actor.agents.host=%s: agents reach the policy WITHOUT ENCRYPTION. The network can read their"
    " keys, prompts and answers. Set actor.agents.tls_certificate and actor.agents.tls_key, or keep"
    " the default host and use a tunnel (docs/BRING_YOUR_OWN_AGENT.md)"
)


def server_tls(section: str, certificate: str, key: str) -> ssl.SSLContext | None:
    """Return the context of a server, None without a certificate.

    Args:
        section: section of the keys `tls_certificate` and `tls_key`, for errors.
        certificate: PEM file with the certificate, and the certificates between it and the root.
        key: PEM file with the private key, without a password.

    Raises: ConfigError: a file is missing, or it is no certificate or no matching key.
    """
    if not certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # `ssl.SSLError` is one.
        files = f"{section}.tls_certificate={certificate}, {section}.tls_key={key}"
        raise ConfigError(
            f"{files}: {error.strerror or error}; both must be PEM files that belong together,"
            " and the key must have no password"
        ) from error
    return context


logger = logging.getLogger(__name__)

# Addresses of documentation: the route to them is the route to other machines. No packet is sent.
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
BACKLOG = 1024  # Connections that wait to be accepted.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentListener:
    """A listening socket and the URL under which agents reach it."""

    socket: socket.socket
    tls: ssl.SSLContext | None
    url: str


def listen(options: AgentServerOptions, *, num_ports: int = 1) -> AgentListener:
    """Return a listener at the first free one of `num_ports` ports.

    Raises: ConfigError: the address, all ports or the certificate cannot be used.
    """
    host = options.host
    if host in (IPV4, IPV6) and not can_bind(host):
        host = loopback()  # A machine without IPv4 has another loopback address.
    tls = server_tls("actor.agents", options.tls_certificate, options.tls_key)
    place = _bound(host, options.port, num_ports)
    url = _advertised(options, place, scheme="https" if tls else "http")
    if tls is None and not is_loopback(host):
        logger.warning(UNENCRYPTED, options.host)
    return AgentListener(socket=place, tls=tls, url=url)


def _bound(host: str, port: int, num_ports: int) -> socket.socket:
    ports = range(port, min(port + num_ports, 65536)) if port else range(1)
    for candidate in ports:
        try:
            ((family, _, _, _, address), *_) = socket.getaddrinfo(
                host, candidate, type=socket.SOCK_STREAM
            )
            is_both = host == "::" and socket.has_dualstack_ipv6()
            return socket.create_server(
                address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_both
            )
        except socket.gaierror as error:
            raise ConfigError(f"actor.agents.host={host}: {error.strerror}") from error
        except OSError as error:
            if candidate == ports[-1]:
                key = "port" if port else "host"
                value = f"{port}, host={host}" if port else host
                raise ConfigError(f"actor.agents.{key}={value}: {error.strerror}") from error
    raise ConfigError(f"actor.agents.port={port}: there is no port to listen at")


def _advertised(options: AgentServerOptions, place: socket.socket, *, scheme: str) -> str:
    """Return the URL for agents, without a slash at its end. Raises: ConfigError."""
    host, port = place.getsockname()[:2]
    if options.advertise:
        return options.advertise.replace(PORT, str(port)).rstrip("/")
    if host in WILDCARDS:
        try:
            host = local_address_towards(OUTSIDE[place.family])
        except WireError as error:
            raise ConfigError(
                f"actor.agents.host={host}: this machine has no route to other machines, so its"
                " address is unknown. Set actor.agents.advertise to the URL for agents"
            ) from error
    elif options.host not in (IPV4, IPV6):
        host = options.host  # A certificate contains the name, not the address.
    return f"{scheme}://{bracketed(host)}:{port}"
