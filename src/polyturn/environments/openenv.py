"""`env: openenv:./my_env`: an OpenEnv environment, with its server started as a separate process.

    openenv:./my_env                      a folder with an openenv.yaml, which names the application
    openenv:echo_env.server.app:app       an application in an installed package
    openenv:http://gpu7:8000              a server that is already running

An episode is one WebSocket connection that carries JSON; closing it closes the environment. The adapter starts up to
`servers` servers when they are needed, each for `sessions` concurrent episodes, and stops them when the run ends, even by an
error. They run in the interpreter `python`, which needs the environment's packages; this process does not.
"""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from polyturn.core.errors import ConfigError, EngineError, MissingModuleError, SchedulerError, did_you_mean, one_line
from polyturn.core.reward import as_flag, as_score, brief
from polyturn.engines.launcher import LaunchSpec, Server
from polyturn.environments.base import Adapter
from polyturn.environments.openenv_codec import OpenEnvCodec, loads
from polyturn.infra.aio import PerLoop
from polyturn.infra.http import whole
from polyturn.rollout.calls import keeps_deadlines

if TYPE_CHECKING:
    import aiohttp

INSTALL = "openenv"
MAX_MESSAGE_BYTES = 8 << 20
_FENCE = {"type": "state"}
"""A message that is sent after every request. Answers do not name their requests, so an extra answer would pass for the
answer to the next request. If the second answer is neither a state nor an error, the server answered the request twice."""
_REFUSALS = ("VALIDATION_ERROR", "INVALID_JSON")
"""Error codes for an action that the environment does not accept. The model reads the error, and the episode continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvOptions:
    """`env.kwargs` of an OpenEnv environment."""

    python: str = sys.executable
    """The Python interpreter of the server."""
    sessions: int = 1
    """Number of concurrent episodes of one server: its `max_concurrent_envs`."""
    servers: int = 4
    """Largest number of servers; if all are full, an episode waits."""
    start_s: float = 120.0
    """Seconds within which a new server must answer /health."""
    timeout_s: float = 60.0
    """Seconds within which the environment must answer a message."""
    action: str | None = None
    """The field of an action that takes the model's text; None derives it from the environment's schema."""
    show: str | None = None
    """The field of an observation that the model sees; None shows everything except `metadata`."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Sent at every reset, in addition to the seed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server's process."""


class OpenEnv(Adapter):
    """Makes environments of an OpenEnv server."""

    def __init__(self, name: str, id: str, kwargs: Mapping[str, Any], *, base: Path | None = None) -> None:
        super().__init__(name, id, kwargs, base=base)
        self.options = _options(name, kwargs)
        self._url = id.rstrip("/") if id.startswith(("http://", "https://")) else None
        self._spec = None if self._url is not None else self._launch_spec()
        self._slots: list[_Slot] = []
        self._freed = PerLoop(asyncio.Condition)
        self._is_closed = False
        if self._spec is not None:
            atexit.register(self.close)

    def make(self) -> Any:
        """Return a session; `reset` connects it."""
        return OpenEnvSession(self)

    def close(self) -> None:
        """Stop the servers that this adapter started."""
        self._is_closed = True
        atexit.unregister(self.close)
        slots, self._slots = self._slots, []
        for slot in slots:
            if slot.server is not None:
                slot.server.end()

    async def take(self) -> _Slot:
        """Return a slot of a server with room for another episode, starting the server if necessary.

        The caller returns the slot with `give_back`.

        Raises:
            SchedulerError: the server cannot be started.
        """
        if self._url is not None:
            return _Slot(url=self._url)
        async with (freed := self._freed()):
            while True:
                await self._end_dead()
                if self._is_closed:
                    raise SchedulerError(f"the environment {self.name!r}: the run has ended")
                alive = [slot for slot in self._slots if slot.is_alive]
                free = next((slot for slot in alive if slot.num_used < self.options.sessions), None)
                if free is None and len(alive) < self.options.servers:
                    free = _Slot()
                    self._slots.append(free)
                if free is not None:
                    free.num_used += 1
                    break
                await freed.wait()
        try:
            async with free.starting:
                if not free.url:
                    assert self._spec is not None
                    free.server = await Server.start(self._spec)
                    free.url = free.server.url
        except BaseException as problem:  # the slot stays; the next episode in it starts the server again
            await self.give_back(free)
            if isinstance(problem, EngineError):
                raise SchedulerError(
                    f"the environment {self.name!r}: its server does not start: {one_line(problem)}"
                ) from problem
            raise
        return free

    async def _end_dead(self) -> None:
        """Remove dead servers and end their child processes, once no episode is left that may read the server's log."""
        for slot in self._slots[:]:
            if slot.server is not None and not slot.is_alive and slot.num_used == 0:
                self._slots.remove(slot)
                await slot.server.stop()

    async def give_back(self, slot: _Slot) -> None:
        """Return a slot, so that another episode can use it."""
        if self._url is None:
            async with (freed := self._freed()):
                slot.num_used -= 1
                freed.notify_all()

    def _launch_spec(self) -> LaunchSpec:
        folder, app = self.base, self.id
        if "/" in self.id or self.id.startswith("."):
            folder = self.base / self.id
            app = _app_of(folder, name=self.name)
        elif ":" not in self.id:
            raise ConfigError(
                f"env {self.name!r}: {self.id!r} is not an application; use 'openenv:package.server.app:app', a folder "
                "such as 'openenv:./my_env', or an address 'openenv:http://…'"
            )
        if shutil.which(self.options.python) is None:
            raise ConfigError(f"env {self.name!r}: there is no interpreter {self.options.python!r}; see env.kwargs.python")
        self._check_interpreter(app.partition(":")[0], folder)
        command = (self.options.python, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "{port}")
        return LaunchSpec(
            command=(*command, "--app-dir", str(folder.resolve()), "--log-level", "warning"),
            env={"PYTHONUNBUFFERED": "1", **self.options.variables},
            ready_timeout_s=self.options.start_s,
            stop_timeout_s=5.0,
        )

    def _check_interpreter(self, module: str, folder: Path) -> None:
        root = module.partition(".")[0]
        is_here = (folder / root).exists() or (folder / f"{root}.py").exists()
        for package, pip in (("openenv", INSTALL), ("uvicorn", "uvicorn"), *([] if is_here else [(root, None)])):
            if _has(self.options.python, package):
                continue
            what = f"pip install {pip}" if pip else f"install the package that {self.id!r} is in"
            raise MissingModuleError(
                f"env {self.name!r} needs the package {package!r} in {self.options.python}; {what}, or name an interpreter "
                "that has it in env.kwargs.python"
            )


@dataclass(slots=True, eq=False)
class _Slot:
    url: str = ""
    server: Server | None = None
    num_used: int = 0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_alive(self) -> bool:
        return self.server is None or self.server.is_alive


@keeps_deadlines
class OpenEnvSession:
    """A connection to one environment, for one episode."""

    def __init__(self, adapter: OpenEnv) -> None:
        self._adapter = adapter
        self._slot: _Slot | None = None
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._words: OpenEnvCodec | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: asyncio.Queue[str | None] = asyncio.Queue(1)
        """Messages from the server in order of arrival; None once it has closed the connection."""

    async def reset(self, *, seed: int) -> str:
        """Connect, which creates the environment, and reset it."""
        options = self._adapter.options
        schema = await self.connect()
        try:
            self._words = OpenEnvCodec(schema.get("action") or {}, field=options.action, show=options.show)
        except (AttributeError, TypeError) as problem:
            raise self._lost(f"describes its actions with {brief(schema)}, which is not a JSON schema") from problem
        answer = await self.ask("reset", {"seed": seed % (1 << 31), **options.reset})
        return self._words.shown(answer.get("observation"))

    async def connect(self) -> dict[str, Any]:
        """Connect, which creates the environment; return the server's schemas.

        Raises:
            SchedulerError: the server cannot be reached.
        """
        import aiohttp

        self._slot = slot = await self._adapter.take()
        options = self._adapter.options
        tracing = aiohttp.TraceConfig()
        tracing.on_request_redirect.append(_refuse_redirect)
        timeout = aiohttp.ClientTimeout(total=None, connect=options.timeout_s)
        self._http = aiohttp.ClientSession(timeout=timeout, trace_configs=[tracing])
        try:
            async with asyncio.timeout(options.timeout_s):
                async with self._http.get(f"{slot.url}/schema", allow_redirects=False) as reply:
                    body = await whole(reply.content.iter_any(), limit=MAX_MESSAGE_BYTES)
                schema = dict(loads(body.decode())) if reply.status == 200 else {}
                self._socket = await self._http.ws_connect(f"{slot.url}/ws", max_msg_size=MAX_MESSAGE_BYTES, autoping=False)
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, RecursionError) as problem:
            raise self._lost(f"cannot be reached ({one_line(problem) or 'no answer in time'})") from problem
        self._reading = asyncio.create_task(self._read(self._socket))
        return schema

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Receive messages all the time, so that pings are answered while the model generates."""
        import aiohttp

        text: str | None = ""
        while text is not None:
            try:
                while (message := await socket.receive()).type is aiohttp.WSMsgType.PING:
                    await socket.pong(message.data)
                    await asyncio.sleep(0)  # lets other tasks run between messages
                text = message.data if message.type is aiohttp.WSMsgType.TEXT else None
            except (ConnectionError, aiohttp.ClientError):
                text = None
            await self._answers.put(text)

    async def step(self, action: str) -> tuple[str, float, bool, Mapping[str, Any]]:
        """Take the action in the model's text. If the environment refuses it, the observation is the error."""
        assert self._words is not None
        data = self._words.action(action)
        if isinstance(data, str):
            return data, 0.0, False, {"is_refused": True}
        answer = await self.ask("step", data)
        if "error" in answer:
            return f"The action is refused: {answer['error']}", 0.0, False, {"is_refused": True}
        return self._words.shown(answer.get("observation")), *self.outcome(answer), {}

    def outcome(self, answer: Mapping[str, Any]) -> tuple[float, bool]:
        """Return the reward of a step, and whether the episode is over.

        Raises:
            SchedulerError: the answer has no valid reward or done flag.
        """
        reward, done = answer.get("reward"), answer.get("done")
        score, is_over = as_score(0 if reward is None else reward), as_flag(done)
        if score is None or is_over is None:
            raise self._lost(f"answered a step with the reward {brief(reward)} and done {brief(done)}")
        return score, is_over

    async def close(self) -> None:
        """Close the connection, which makes the server close the environment, and return the slot."""
        socket, self._socket = self._socket, None
        http, self._http = self._http, None
        slot, self._slot = self._slot, None
        try:
            if socket is not None:
                async with asyncio.timeout(self._adapter.options.timeout_s):
                    if not socket.closed:
                        await socket.send_json({"type": "close"})
                    await socket.close()
        except (ConnectionError, TimeoutError):
            pass  # the server is gone, and the environment with it
        finally:
            if self._reading is not None:
                self._reading.cancel()
            if http is not None:
                await http.close()
            if slot is not None:
                await self._adapter.give_back(slot)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment's answer to a reset or a step; the key `error` has the reason for a refused action.

        Raises:
            SchedulerError: the environment failed or refused the reset, or the connection is lost.
        """
        import aiohttp

        assert self._socket is not None and self._reading is not None
        early = None if self._answers.empty() else self._answers.get_nowait()
        if early is not None:
            self._parsed(early, kind)
            raise self._lost(f"sent an extra message before a {kind}: {early!r:.200}")
        try:
            async with asyncio.timeout(self._adapter.options.timeout_s):
                for message in ({"type": kind, "data": data}, _FENCE):
                    await self._socket.send_json(message)
                text = await self._answers.get()
                behind = None if text is None else await self._answers.get()
        except TimeoutError as problem:
            self._reading.cancel()  # drops the connection; closing it would wait for the server once more
            raise self._lost(f"took longer than {self._adapter.options.timeout_s:g} s for a {kind}") from problem
        except (ConnectionError, aiohttp.ClientError) as problem:
            raise self._lost(f"closed the connection at a {kind}") from problem
        if text is None:
            raise self._lost(f"closed the connection at a {kind}")
        answer = self._parsed(text, kind)
        if behind is not None and _kind_of(behind) not in ("state", "error"):
            raise self._lost(f"sent an extra message at a {kind}: {text!r:.200}, followed by {behind!r:.200}")
        if kind == "reset" and "error" in answer:
            raise self._lost(f"refuses the reset: {answer['error']}")
        return answer

    def _parsed(self, text: str, kind: str) -> dict[str, Any]:
        try:
            answer = loads(text)
            data = answer["data"]
            payload = self._refusal(data, kind) if answer["type"] == "error" else dict(data)
            if answer["type"] not in ("error", "observation"):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise self._lost(f"answered a {kind} with {text!r:.200}") from problem
        return payload

    def _refusal(self, data: Mapping[str, Any], kind: str) -> dict[str, Any]:
        code, message = data.get("code"), data.get("message")
        if code in _REFUSALS:
            wrong = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in data.get("errors") or ()]
            return {"error": "; ".join(wrong) or message}
        if code == "CAPACITY_REACHED":
            raise self._lost(
                f"has no room for another episode ({message}); set env.kwargs.sessions to its max_concurrent_envs, which is "
                f"{data.get('max_sessions', '?')}"
            )
        raise self._lost(f"failed at a {kind}: {message} ({code})")

    def _lost(self, what: str) -> SchedulerError:
        server = None if self._slot is None else self._slot.server
        tail = (
            "" if server is None or server.is_alive else f"; its server has ended: {' / '.join(server.tail(5).splitlines())}"
        )
        return SchedulerError(f"the environment {self._adapter.name!r} {what}{tail}")


async def _refuse_redirect(*_: object) -> None:
    import aiohttp

    raise aiohttp.ClientError("it answers with a redirect, and redirects are not followed")


def _kind_of(text: str) -> Any:
    try:
        return loads(text)["type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _options(name: str, kwargs: Mapping[str, Any]) -> OpenEnvOptions:
    known = list(OpenEnvOptions.__dataclass_fields__)
    for key in kwargs:
        if key not in known:
            raise ConfigError(f"env {name!r}: there is no env.kwargs.{key}.{did_you_mean(key, known)}")
    options = OpenEnvOptions(**{**kwargs, "python": os.path.expanduser(str(kwargs.get("python", sys.executable)))})
    if not all(isinstance(number, int) and number >= 1 for number in (options.sessions, options.servers)):
        raise ConfigError(
            f"env {name!r}: sessions is {options.sessions!r} and servers is {options.servers!r}; use integers of at least 1"
        )
    variables = options.variables
    if not isinstance(variables, Mapping) or any(
        isinstance(value, bool) or not isinstance(value, str | int | float) for value in variables.values()
    ):
        raise ConfigError(f"env {name!r}: env.kwargs.variables is {brief(variables)}; use a mapping of names to texts")
    return dataclasses.replace(options, variables={str(key): str(value) for key, value in variables.items()})


def _app_of(folder: Path, *, name: str) -> str:
    """Return the application that a folder's openenv.yaml names."""
    manifest = folder / "openenv.yaml"
    if not manifest.is_file():
        raise ConfigError(f"env {name!r}: there is no {manifest}; name a folder made by `openenv init`, or an application")
    try:
        read = yaml.safe_load(manifest.read_text(encoding="utf-8"))
    except yaml.YAMLError as problem:
        raise ConfigError(f"env {name!r}: {manifest} cannot be read: {one_line(problem)}") from problem
    app = read.get("app") if isinstance(read, dict) else None
    if not isinstance(app, str) or ":" not in app:
        raise ConfigError(f"env {name!r}: {manifest} names the app {app!r}; it must be 'module:application'")
    return app


def _has(python: str, package: str) -> bool:
    if python == sys.executable:
        return importlib.util.find_spec(package) is not None
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    try:
        return subprocess.run([python, "-c", probe, package], check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise ConfigError(
            f"the interpreter {python!r} cannot be run: {one_line(problem)}; see env.kwargs.python"
        ) from problem
