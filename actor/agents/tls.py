"""TLS of a server with a certificate from files."""

import ssl

from common.errors import ConfigError

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
