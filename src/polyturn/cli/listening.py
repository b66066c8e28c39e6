"""Listening of the commands that serve over HTTP: for programs (search, sandbox, tools), for people (the viewer, the desk).

Separate because what is served differs and this does not: the port that is free, who may ask, what is said at the start. A
page for people makes its own token where others could reach it, and the link that is printed has it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyturn.cli.console import Output
from polyturn.cli.serve import ServeOptions, read_token, server_rules
from polyturn.core.errors import ConfigError
from polyturn.infra.loop import run_loop

if TYPE_CHECKING:
    from polyturn.serving.auth import ServerRules

logger = logging.getLogger(__name__)


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
    rules = server_rules(
        options.host,
        token,
        rate_limit=options.rate_limit,
        allowed_hosts=options.allowed_hosts,
        max_body_bytes=max_body_bytes,
    )
    app = make(rules)
    bound = options.bind()
    name, port = bound.getsockname()[:2]
    link = f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")
    Output().fact(label, link)
    run_loop(uvicorn.Server(http_config(app, rules)).serve(sockets=[bound]))
