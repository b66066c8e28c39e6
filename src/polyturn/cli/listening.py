"""Listening of the commands that serve over HTTP: for programs (a model, tools), for people (the viewer, the desk).

Separate because what is served differs and this does not: the port that is free, who may ask, the line that says where. A
page for people makes its own token where others could reach it, and the link that is printed has it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Options of the server itself, not of its episodes."""

    host: str = "127.0.0.1"
    port: int | None = None
    """The port that was asked for, and no other; None takes the first free one from `first_port` on."""
    first_port: int = 8000
    token: str | None = None
    """The token itself; else it is in `token_file`."""
    token_file: Path | None = None
    """File with the token; else the environment variable POLYTURN_TOKEN."""
    grace_s: float = 30.0
    deadline_s: float | None = None
    rate_limit: str | None = None
    """The rate at which one client may ask, as `ClientRateLimit.parse` reads it; None is as often as it likes."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names under which the server is reached."""

    def bind(self) -> socket.socket:
        """Return a socket that listens.

        Raises:
            ConfigError: the address is not one of this machine's, or the port is in use.
        """
        from polyturn.serving.listen import bind

        return bind(self.host, self.first_port if self.port is None else self.port, is_only=self.port is not None)

    def check_port(self) -> None:
        """Refuse a port that was asked for and is in use, before a model is loaded for it.

        Raises:
            ConfigError: as `bind` does.
        """
        if self.port is not None:
            self.bind().close()

    def rules(self, **changes: Any) -> ServerRules:
        """Return the rules for requests of programs; `changes` are fields of `ServerRules`.

        Raises:
            ConfigError: the address would be open to others without a token, or a value cannot work.
        """
        token = self.token
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE) if self.token_file is None else read_token(self.token_file)
        return self.rules_of(token, **changes)

    def rules_of(self, token: str | None, **changes: Any) -> ServerRules:
        """Return the rules with this token; raises what `rules` raises."""
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
        ConfigError: it cannot be read.
    """
    try:
        if path.stat().st_mode & 0o077:
            logger.warning("the token file %s can be read by others; run `chmod 600 %s`", path, path)
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the token file {str(path)!r} cannot be read ({one_line(problem)})") from problem


@contextmanager
def needing(extra: str, *, what: str) -> Iterator[None]:
    """Import inside what `what` needs; `extra` of this package brings it.

    Raises:
        ConfigError: something of it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{missing.name} is not installed; `pip install 'polyturn[{extra}]'` brings what {what} needs"
        ) from None


def listen(app: Any, options: ServeOptions, rules: ServerRules, *, what: str, path: str, more: str = "") -> None:
    """Serve an application to programs until a signal asks to stop.

    Args:
        app: The application, which is guarded.
        options: Where it listens.
        rules: What it is guarded with.
        what: What is served, for the log.
        path: Where programs ask.
        more: What else the log says, behind the address.
    """
    import uvicorn

    from polyturn.serving.listen import http_config

    bound = options.bind()
    host, port = bound.getsockname()[:2]
    logger.info("%s on http://%s:%d%s%s", what, host, port, path, more)
    config = http_config(app, rules, lifespan="on", timeout_graceful_shutdown=int(options.grace_s))
    run_loop(uvicorn.Server(config).serve(sockets=[bound]))


def show_page(make: Callable[[ServerRules], Any], options: ServeOptions, *, label: str, max_body_bytes: int) -> None:
    """Serve a page to people until interrupted.

    Args:
        make: Returns the application under the rules.
        options: Where it listens; without a token, one is made where others could reach it.
        label: What the link is for.
        max_body_bytes: The largest request that is read.

    Raises:
        ConfigError: the address cannot be used.
    """
    import uvicorn

    from polyturn.serving.auth import is_loopback
    from polyturn.serving.listen import http_config

    token = None if options.token_file is None else read_token(options.token_file)
    if not is_loopback(options.host) and token is None:
        token = secrets.token_urlsafe(24)
    rules = options.rules_of(token, max_body_bytes=max_body_bytes)
    app = make(rules)
    bound = options.bind()
    name, port = bound.getsockname()[:2]
    link = f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
    Output().fact(label, link)
    run_loop(uvicorn.Server(http_config(app, rules)).serve(sockets=[bound]))
