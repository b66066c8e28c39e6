"""Which address a server listens on: this machine only unless a token is demanded; the next free port, said aloud."""

from __future__ import annotations

import ipaddress
import logging
import socket

from polyturn.core.errors import ConfigError
from polyturn.serving.rules import check_token

logger = logging.getLogger(__name__)

_NUM_PORTS = 100
MIN_TOKEN = 16
"""Characters of a token that guards an address which others can reach."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host's address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, token: str | None) -> None:
    """Refuse an address that others can reach without a token.

    Raises:
        ConfigError: it is, or the token is none, or one that is soon guessed.
    """
    check_token(token)
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"the server would listen on {host}, where others can reach it, and has no token; set POLYTURN_TOKEN (or "
            "--token-file), or listen on 127.0.0.1"
        )
    if token is not None and not is_loopback(host) and len(token) < MIN_TOKEN:
        raise ConfigError(
            f"the token has {len(token)} characters, and others can reach {host}; give one of {MIN_TOKEN} or more, such as "
            "`openssl rand -hex 24` makes"
        )


def bind(host: str, port: int, *, is_only: bool = False) -> socket.socket:
    """Return a socket that is bound to the port, or to the next free one unless the port is the only one that will do.

    Raises:
        ConfigError: the host is not an address of this machine, the port is none, or no port is free.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"the port is {port}; a port is a number from 0, which takes any, to 65535")
    last = port if port == 0 or is_only else min(port + _NUM_PORTS, 65535)
    for candidate in range(port, last + 1):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, candidate))
            bound.listen(2048)
        except OSError as problem:
            bound.close()
            if candidate == last or not isinstance(problem, OSError) or problem.errno not in (98, 48):
                hint = "; end what listens there, or give another --port (0 takes any)" if problem.errno in (98, 48) else ""
                raise ConfigError(f"cannot listen on {host}:{candidate}: {problem.strerror}{hint}") from problem
            continue
        if candidate != port and port != 0:
            logger.warning("port %d is in use; listening on %d instead", port, candidate)
        return bound
    raise AssertionError("the last port is tried")
