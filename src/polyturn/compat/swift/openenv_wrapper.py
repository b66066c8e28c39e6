"""swift.rollout.openenv_wrapper: ms-swift's interface to an OpenEnv server, on top of the native environment.

    wrapper = OpenEnvWrapper({"base_url": "http://gpu7:8000", "reset_kwargs": {"seed": 3}})
    observation, metadata = wrapper.reset()
    observation, reward, done, metadata = wrapper.step({"message": "[1 2 3]"})

An episode is one WebSocket connection, in a thread with its own event loop, because schedulers call the wrapper from sync
and async code. A step is never repeated, so a lost connection ends its episode.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any

from polyturn.environments.openenv import OpenEnv, OpenEnvSession
from polyturn.infra.aio import in_background

_DEFAULT_URL = "http://localhost:8000"


class OpenEnvWrapper:
    """One episode of an OpenEnv server. Its methods block; the shipped scheduler calls them in threads."""

    def __init__(self, env_config: Mapping[str, Any]) -> None:
        self.base_url = str(env_config.get("base_url") or _DEFAULT_URL).rstrip("/")
        self.reset_kwargs = dict(env_config.get("reset_kwargs") or {})
        options = {"timeout_s": float(env_config["timeout_s"])} if "timeout_s" in env_config else {}
        self._adapter = OpenEnv(f"openenv:{self.base_url}", self.base_url, options)
        self._session: OpenEnvSession | None = None

    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Begin an episode on a new connection; return the server's observation and its metadata."""
        self.close()
        self._session = session = self._adapter.make()
        try:
            _wait(session.connect())
            reply = _wait(session.ask("reset", self.reset_kwargs))
        except BaseException:
            self.close()
            raise
        return reply.get("observation"), _metadata(reply)

    def step(self, action: Mapping[str, Any]) -> tuple[Any, float, bool, dict[str, Any]]:
        """Act and return observation, reward, done and metadata.

        If the environment refuses the action, the observation is the error for the model.
        """
        assert self._session is not None, "step was called before reset"
        reply = _wait(self._session.ask("step", action))
        if "error" in reply:
            return f"The action is refused: {reply['error']}", 0.0, False, {"is_refused": True}
        return reply.get("observation"), *self._session.outcome(reply), _metadata(reply)

    def close(self) -> None:
        """Close the connection, which ends the episode."""
        session, self._session = self._session, None
        if session is not None:
            _wait(session.close())


def _metadata(reply: Mapping[str, Any]) -> dict[str, Any]:
    metadata = reply.get("metadata")
    return dict(metadata) if isinstance(metadata, Mapping) else {}


def _wait(work: Coroutine[Any, Any, Any]) -> Any:
    return in_background(work, thread="polyturn-openenv")
