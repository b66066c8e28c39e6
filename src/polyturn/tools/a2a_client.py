"""An A2A agent as this library asks it: a message in, an answer out, within a deadline. The one module with that SDK.

    agent = A2AAgent("http://127.0.0.1:9000", token=None)
    agent.open()                                                       counts one user
    conversation = A2AConversation()
    answer = await agent.ask(conversation, text="Paris to Rome", timeout_s=60)
    conversation.context_id, answer.text, answer.state                 "c-17", "Two flights: …", "completed"
    await agent.close()                                                the last user closes the HTTP client

What the agent says may be a message, or a task that goes on for a while: its updates are followed, by a stream where it has
one, and by asking again where not. A task whose caller is gone is cancelled at the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from polyturn.core.errors import ConfigError, ToolConnectionError, ToolError, ToolTimeoutError, one_line
from polyturn.core.secrets import bearer, hide
from polyturn.infra.run_sync import in_own_loop
from polyturn.tools.a2a_parts import A2AAnswer, A2AConversation, answer_of, plain, request_of, state_of, update_task
from polyturn.tools.http_client import http_client

CARD_PATH = "/.well-known/agent-card.json"
MAX_ANSWER_BYTES = 64 << 20
MAX_CONNECTIONS = 1024
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
CANCEL_S = 5.0
CARD_S = 30.0
"""Seconds that an agent may take to show its card."""
_WORKING = ("submitted", "working", "unspecified")
_OPEN = ("input_required", "auth_required")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError, SystemError)
"""Errors of the SDK, and of the compiled messages under it, at an answer that is none."""


class A2AAgent:
    """One agent, shared by all episodes."""

    def __init__(self, url: str, *, token: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        """Remember where an agent is.

        Args:
            url: Its address, or that of its card.
            token: Sent as `Authorization: Bearer TOKEN`.
            headers: Further ones.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r:.100}; write the http(s) address of an A2A agent or of its card")
        self.url = url
        self._headers = {**(headers or {}), **bearer(token)}
        self._token = token
        self._num_users = 0
        self._client: asyncio.Task[Any] | None = None
        self._leaving: set[asyncio.Task[Any]] = set()

    @property
    def num_users(self) -> int:
        """Number of episodes that may ask it."""
        return self._num_users

    def open(self) -> None:
        """Count one user."""
        self._num_users += 1

    async def close(self) -> None:
        """Count one user off; the last one closes the connections."""
        self._num_users -= 1
        client, self._client = (self._client, None) if self._num_users == 0 else (None, self._client)
        if client is None:
            return
        if not client.done():
            client.cancel()
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=CANCEL_S)
        with contextlib.suppress(Exception, asyncio.CancelledError):
            await (await client).close()

    def read_card(self, *, timeout_s: float = 30.0) -> Any:
        """Return the agent's card, also from where no event loop runs.

        Raises:
            ConfigError: it cannot be had.
        """

        async def fetch() -> Any:
            async with asyncio.timeout(timeout_s), _http_client(self.url, self._headers) as http:
                return await self._card(http)

        try:
            return in_own_loop(fetch)
        except ConfigError:
            raise
        except Exception as problem:
            raise ConfigError(
                f"the A2A agent at {self.url} shows no card: {self._reason(problem)}; looked for at {self._card_url()}"
            ) from problem

    async def ask(
        self,
        conversation: A2AConversation,
        *,
        text: str = "",
        data: Mapping[str, Any] | None = None,
        skill: str = "",
        timeout_s: float,
    ) -> A2AAnswer:
        """Say something in a conversation, and return the answer when it is whole.

        Args:
            conversation: Changed to where it stands afterwards.
            text: What is said.
            data: The same as data.
            skill: The agent's skill that is meant.
            timeout_s: The deadline.

        Raises:
            ToolError: the agent refused, failed or wants credentials.
            ToolTimeoutError: it did not answer in time; the task is cancelled.
            ToolConnectionError: it cannot be reached.
        """
        _sdk()
        from a2a.utils.errors import A2AError

        task_id = conversation.task_id
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._connect()
                return await self._follow(client, conversation, request_of(conversation, text, data, skill))
        except TimeoutError:
            self.leave(conversation)
            raise ToolTimeoutError(f"the agent did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self.leave(conversation)
            raise
        except A2AError as problem:
            if _is_unreachable(problem):
                raise ToolConnectionError(f"the agent at {self.url} cannot be reached: {self._reason(problem)}") from problem
            if conversation.task_id == task_id:
                conversation.task_id = ""  # the next message does not meet what refused this one
            raise ToolError(f"the agent refused: {self._reason(problem)}") from problem
        except (*_UNREADABLE, _parse_error()) as problem:  # whatever the SDK makes of an answer that is none
            conversation.task_id = ""
            raise ToolError(f"the agent's answer cannot be read: {self._reason(problem)}") from problem
        except (OSError, _http_error()) as problem:
            raise ToolConnectionError(f"the agent at {self.url} cannot be reached: {self._reason(problem)}") from problem

    def leave(self, conversation: A2AConversation) -> None:
        """Tell the agent to stop the conversation's task, if one is open, without waiting for it."""
        task_id, conversation.task_id = conversation.task_id, ""
        if not task_id or self._client is None:
            return
        task = asyncio.create_task(self._cancel(self._client, task_id))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    # ---- inside -----------------------------------------------------------------------------------------------------

    async def _connect(self) -> Any:
        """Return the SDK's client; many ask for it at once, and one makes it."""
        running = asyncio.get_running_loop()
        if self._client is not None and (self._client.get_loop() is not running or _has_failed(self._client)):
            self._client = None
        if self._client is None:
            self._client = asyncio.create_task(self._make())
        return await asyncio.shield(self._client)

    async def _make(self) -> Any:
        from a2a.client import ClientConfig, ClientFactory

        http = _http_client(self.url, self._headers)
        try:
            try:
                async with asyncio.timeout(CARD_S):  # the caller may be gone before; the next one asks again
                    card = await self._card(http)
            except TimeoutError:
                raise ToolTimeoutError(f"the agent did not show its card within {CARD_S:g} s") from None
            bindings = ["JSONRPC", "HTTP+JSON"]
            config = ClientConfig(httpx_client=http, polling=True, supported_protocol_bindings=bindings)
            try:
                client = ClientFactory(config).create(card)
            except ValueError as problem:
                raise ToolConnectionError(
                    f"the agent at {self.url} speaks neither JSON-RPC nor REST: {problem}"
                ) from problem
        except BaseException:
            await http.aclose()
            raise
        return _SdkClient(client, http)

    async def _card(self, http: Any) -> Any:
        _sdk()
        from a2a.client import A2ACardResolver

        base, path = self._card_parts()
        return await A2ACardResolver(http, base, path).get_agent_card()

    def _card_parts(self) -> tuple[str, str]:
        parts = urlsplit(self.url)
        if parts.path.endswith(".json"):
            return f"{parts.scheme}://{parts.netloc}", parts.path
        return self.url.rstrip("/"), CARD_PATH

    def _card_url(self) -> str:
        return "".join(self._card_parts())

    async def _follow(self, client: Any, conversation: A2AConversation, request: Any) -> A2AAnswer:
        """Send a message and follow what comes of it."""
        from a2a.types import GetTaskRequest, Task

        task = Task()
        async with contextlib.aclosing(client.sdk.send_message(request)) as events:
            async for event in events:
                if event.HasField("message"):
                    conversation.context_id = event.message.context_id or conversation.context_id
                    conversation.task_id = event.message.task_id
                    return answer_of(event.message.parts, state="message", metadata=event.message.metadata)
                update_task(task, event)
                conversation.context_id, conversation.task_id = task.context_id, task.id
        pause_s = FIRST_PAUSE_S
        while state_of(task) in _WORKING:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            task = await client.sdk.get_task(GetTaskRequest(id=task.id))
        return self._judge(conversation, task)

    def _judge(self, conversation: A2AConversation, task: Any) -> A2AAnswer:
        state, text = state_of(task), task.status.message
        conversation.context_id = task.context_id
        conversation.task_id = task.id if state in _OPEN else ""
        parts = [part for artifact in task.artifacts for part in artifact.parts]
        parts = [*parts, *text.parts] if state != "completed" or not parts else parts
        metadata = {**plain(task.metadata), **plain(text.metadata)}
        answer = answer_of(parts, state=state, metadata=metadata)
        if state == "failed":
            raise ToolError(f"the agent failed: {answer.text or 'it gave no reason'}")
        if state == "auth_required":
            self.leave(conversation)
            raise ToolError(f"the agent wants credentials: {answer.text or 'it does not say which'}")
        return answer

    def _reason(self, problem: BaseException) -> str:
        return hide(" ".join(str(problem).split())[:300] or one_line(problem), self._token)

    async def _cancel(self, client: asyncio.Task[Any], task_id: str) -> None:
        from a2a.types import CancelTaskRequest

        with contextlib.suppress(Exception):
            async with asyncio.timeout(CANCEL_S):
                await (await client).sdk.cancel_task(CancelTaskRequest(id=task_id))


class _SdkClient:
    """The SDK's client and the HTTP client under it."""

    def __init__(self, sdk: Any, http: Any) -> None:
        self.sdk = sdk
        self.http = http

    async def close(self) -> None:
        await self.sdk.close()
        await self.http.aclose()


def _sdk() -> None:
    try:
        import a2a.client  # noqa: F401
    except ImportError as problem:
        raise ConfigError(f"A2A agents need their SDK ({problem}): pip install 'polyturn[a2a]'") from problem


def _http_error() -> type[Exception]:
    import httpx

    return httpx.HTTPError


def _parse_error() -> type[Exception]:
    from google.protobuf.json_format import Error

    return Error


def _http_client(url: str, headers: Mapping[str, str]) -> Any:
    """Return a client that sends `headers` to the origin of `url` only; an agent's card may name any other address."""
    import httpx

    async def add(request: Any) -> None:
        if _origin(str(request.url)) == _origin(url):
            request.headers.update(headers)

    client = http_client(
        httpx,
        {},
        max_connections=MAX_CONNECTIONS,
        max_bytes=lambda response: MAX_ANSWER_BYTES,
        too_large=httpx.ReadError,
    )
    client.event_hooks = {**client.event_hooks, "request": [add]}
    return client


def _origin(url: str) -> tuple[str, str, int | None]:
    """Return scheme, host and port; the names of this machine are one host."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, "localhost" if host in ("127.0.0.1", "::1", "0.0.0.0") else host, port


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _is_unreachable(problem: Exception) -> bool:
    from a2a.client.errors import A2AClientError

    return isinstance(problem, A2AClientError)
