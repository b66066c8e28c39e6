"""Listens for HTTP requests: from programs (to a model or tools), or from people (to the viewer or the desk).

It chooses the port, sets the access rules, and logs the address. A page that other machines can reach gets a token, which is
part of the printed link.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.cli.console import Output
from polyturn.core.errors import ConfigError, one_line
from polyturn.infra.loop import run_loop

if TYPE_CHECKING:
    from polyturn.serving.auth import ServerRules

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "POLYTURN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of a server, not of its episodes."""

    host: str = "127.0.0.1"
    port: int | None = None
    """The port; None takes the first free one from `first_port` on."""
    first_port: int = 8000
    token: str | None = None
    """The token; None reads `token_file`."""
    token_file: Path | None = None
    """File with the token; None reads the environment variable POLYTURN_TOKEN."""
    grace_s: float = 30.0
    deadline_s: float | None = None
    rate_limit: str | None = None
    """Rate limit per client, in the format of `ClientRateLimit.parse`; None sets no limit."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names of the server."""

    def bind(self) -> socket.socket:
        """Return a listening socket.

        Raises:
            ConfigError: the address is not on this machine, or the port is in use.
        """
        from polyturn.serving.listen import bind

        return bind(self.host, self.first_port if self.port is None else self.port, is_only=self.port is not None)

    def check_port(self) -> None:
        """Raise if the configured port is in use, before a model is loaded.

        Raises:
            ConfigError: the port is in use, or the address is not on this machine.
        """
        if self.port is not None:
            self.bind().close()

    def rules(self, **changes: Any) -> ServerRules:
        """Return the access rules for programs; `changes` are fields of `ServerRules`.

        Raises:
            ConfigError: the address would be open to others without a token, or a value is invalid.
        """
        token = self.token
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE) if self.token_file is None else read_token(self.token_file)
        return self.rules_of(token, **changes)

    def rules_of(self, token: str | None, **changes: Any) -> ServerRules:
        """Return the rules with this token; raises like `rules`."""
        from polyturn.serving.auth import ServerRules, is_loopback
        from polyturn.serving.listen import check_exposure
        from polyturn.serving.rate_limit import ClientRateLimit

        check_exposure(self.host, token)
        return ServerRules(
            token=token,
            is_loopback=is_loopback(self.host),
            allowed_hosts=frozenset(name.lower() for name in self.allowed_hosts),
            rate=None if self.rate_limit is None else ClientRateLimit.parse(self.rate_limit),
            **changes,
        )


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        if path.stat().st_mode & 0o077:
            logger.warning("the token file %s can be read by others; run `chmod 600 %s`", path, path)
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the token file {str(path)!r} cannot be read ({one_line(problem)})") from problem


@contextmanager
def needing(extra: str, *, what: str) -> Iterator[None]:
    """Context for the imports of `what`, whose dependencies are in the package's `extra`.

    Raises:
        ConfigError: a dependency is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{missing.name} is not installed; `pip install 'polyturn[{extra}]'` installs the dependencies of {what}"
        ) from None


async def listen(
    app: Any,
    options: ServeOptions,
    rules: ServerRules,
    *,
    what: str,
    path: str = "",
    more: str = "",
    stop: Callable[[float], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Serve an application to programs until a signal.

    Args:
        app: The application, behind its access rules.
        options: Options of the server.
        rules: The access rules.
        what: Name of the service in the log.
        path: Path for requests, for the log.
        more: Text for the log after the address.
        stop: Called with `grace_s` at the signal; ends the work behind the requests within this time.
    """
    from polyturn.serving.listen import origin_of, serve_until_signal

    bound = options.bind()
    logger.info("%s: listening on %s%s%s", what, origin_of(bound), path, more)
    await serve_until_signal(
        app,
        rules,
        bound,
        stop=None if stop is None else partial(stop, options.grace_s),
        lifespan="on",
        timeout_graceful_shutdown=int(options.grace_s) + (0 if stop is None else 5),
    )


def show_page(make: Callable[[ServerRules], Any], options: ServeOptions, *, label: str, max_body_bytes: int) -> None:
    """Serve a page to people until interrupted.

    Args:
        make: Makes the application with the rules.
        options: Options of the server; if other machines can reach it and there is no token, a token is made.
        label: Label of the link.
        max_body_bytes: Largest size of a request, in bytes.

    Raises:
        ConfigError: the address cannot be used.
    """
    from polyturn.serving.auth import is_loopback
    from polyturn.serving.listen import origin_of, serve_until_signal

    token = None if options.token_file is None else read_token(options.token_file)
    if not is_loopback(options.host) and token is None:
        token = secrets.token_urlsafe(24)
    rules = options.rules_of(token, max_body_bytes=max_body_bytes)
    app = make(rules)
    bound = options.bind()
    Output().fact(label, f"{origin_of(bound)}/" + (f"?token={token}" if token else ""))
    run_loop(serve_until_signal(app, rules, bound))
