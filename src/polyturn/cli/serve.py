"""`polyturn serve`: a rollout server of episodes."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyturn.core.errors import ConfigError, one_line
from polyturn.infra.loop import run_loop

if TYPE_CHECKING:
    from polyturn.config.load import Loaded
    from polyturn.config.models import RunConfig
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

    def find_token(self) -> str | None:
        """Return the token, if there is one."""
        if self.token is not None:
            return self.token
        if self.token_file is not None:
            return read_token(self.token_file)
        return os.environ.get(TOKEN_VARIABLE)

    def rules(self, **changes: Any) -> ServerRules:
        """Return the server's rules for requests; `changes` are fields of `ServerRules`.

        Raises:
            ConfigError: the address would be open to others without a token, or a value cannot work.
        """
        return server_rules(
            self.host, self.find_token(), rate_limit=self.rate_limit, allowed_hosts=self.allowed_hosts, **changes
        )


def server_rules(
    host: str, token: str | None, *, rate_limit: str | None, allowed_hosts: Sequence[str], **changes: Any
) -> ServerRules:
    """Return the rules for requests to a server on this host.

    Raises:
        ConfigError: the address would be open to others without a token, or a value cannot work.
    """
    from polyturn.serving.auth import ServerRules, is_loopback
    from polyturn.serving.listen import check_exposure
    from polyturn.serving.rate_limit import ClientRateLimit

    check_exposure(host, token)
    return ServerRules(
        token=token,
        is_loopback=is_loopback(host),
        allowed_hosts=frozenset(name.lower() for name in allowed_hosts),
        rate=None if rate_limit is None else ClientRateLimit.parse(rate_limit),
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


def run(config: Path | None, overrides: Sequence[str], options: ServeOptions) -> None:
    """Serve the scheduler of a configuration until a signal asks to stop."""
    from polyturn.cli.dialects import load_native
    from polyturn.config.load import base_of

    loaded = load_native(config, overrides)
    serve_config(loaded, base=Path() if config is None else base_of(config), options=options)


def serve_config(loaded: Loaded[RunConfig], *, base: Path, options: ServeOptions) -> None:
    try:
        from polyturn.serving.server import serve
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{missing.name} is not installed; `pip install 'polyturn[serve]'` brings what a server needs"
        ) from None
    rules = options.rules()
    options.check_port()

    from polyturn import build
    from polyturn.api.console import quiet_transformers
    from polyturn.serving.app import create_app
    from polyturn.serving.rollout_service import RolloutService

    quiet_transformers()
    if loaded.config.rollout.min_concurrent is not None:
        logger.warning("rollout.min_concurrent is not used: a server runs up to rollout.max_concurrent episodes")
    parts = build.build_parts(build.ConfigSource(config=loaded.config, base=base.resolve()))

    async def serve_parts() -> None:
        service = RolloutService(
            parts.context, max_concurrent=loaded.config.rollout.max_concurrent, deadline_s=options.deadline_s
        )
        app = create_app(
            service,
            model=parts.model,
            rules=rules,
            enable_multi_turn=loaded.config.rollout.scheduler is not None,
            use_gym_env=loaded.config.rollout.scheduler in ("gym", "gym_scheduler"),
        )
        await serve(service, app, bound=options.bind(), rules=rules, grace_s=options.grace_s)

    run_loop(serve_parts())


def overrides_of(
    *,
    model: str | None,
    scheduler: str | None,
    max_turns: int | None,
    plugins: Sequence[str],
    engine: str | None,
    config: Path | None = None,
) -> list[str]:
    """Return the options of the command line as overrides of the configuration."""
    values: dict[str, Any] = {
        "model.path": None if model is None else _model(model, config),
        "rollout.scheduler": scheduler,
        "rollout.limits.max_turns": max_turns,
        "plugins": list(plugins) or None,
        "engine.kind": engine,
    }
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def _model(model: str, config: Path | None) -> str:
    """Return the folder or the hub's name of a model; of a run's folder or a checkpoint's, the model in it.

    Raises:
        CheckpointError: there is no model in the folder.
    """
    if not Path(model).is_dir():
        return model
    from polyturn import build

    folder = build.model_folder(Path(model))
    assert folder is not None
    return str(folder if config is None else folder.resolve())  # paths in a config start from its own folder
