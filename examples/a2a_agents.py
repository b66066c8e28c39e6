"""Agents that speak A2A, as a tool that the model calls and as an interaction that answers its turns.

    pip install 'polyturn[a2a]'

    tools:                                                   # a tool file: one item for each skill
      - class_name: a2a_agents.py:A2ATool
        config: {type: native, url: "http://127.0.0.1:9000", skill: book_flight, timeout: 60}

    interaction:                                             # a file named by rollout.interactions
      - name: negotiator
        class_name: a2a_agents.py:A2AInteraction
        config: {url: "http://127.0.0.1:9000", timeout: 60}

An episode is one conversation with the agent (`contextId`). An A2A task that is late, or open at the episode's end, is
cancelled. A skill describes its input in words, so the model writes a message. A skill made by `to_a2a_skill` has a schema,
and gets the arguments as data.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
from a2a.client import A2AClientError, Client, ClientConfig, create_client
from a2a.types import (
    AgentCard,
    AgentSkill,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    TaskState,
)
from a2a.utils.errors import A2AError
from google.protobuf.json_format import MessageToDict, ParseDict

from polyturn import BaseInteraction, BaseTool, ToolError, ToolResponse
from polyturn.core.errors import ConfigError, ToolConnectionError, ToolTimeoutError
from polyturn.core.messages import Origin
from polyturn.tools.schema import MESSAGE_PARAMETERS, OpenAIFunctionToolSchema

ENDS = ("completed", "rejected", "canceled")
POLL_S = 0.2


class Answer(NamedTuple):
    """An agent's answer."""

    content: ToolResponse
    state: str
    """The state of the agent's task, such as completed or input_required; `message` for an answer without a task."""
    metadata: dict[str, Any]


class Conversation:
    """One conversation with an agent, over its own connection."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.context_id = self.task_id = ""
        self._client: Client | None = None

    async def ask(self, part: dict[str, Any], *, skill: str = "") -> Answer:
        """Send a part, {"text": …} or {"data": …}, and return the complete answer."""
        message = Message(message_id=str(uuid4()), role=Role.ROLE_USER, parts=[ParseDict(part, Part())])
        message.context_id, message.task_id = self.context_id, self.task_id
        if skill:
            message.metadata.update({"skill_id": skill})
        timeout_s = self.config.get("timeout", 60)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(SendMessageRequest(message=message))
        except TimeoutError:
            await self.cancel()
            raise ToolTimeoutError(f"the agent did not answer within {timeout_s:g} s") from None
        except (A2AClientError, httpx.HTTPError) as problem:
            raise ToolConnectionError(f"the agent at {self.config['url']} cannot be reached: {problem}") from problem
        except A2AError as problem:
            self.task_id = ""
            raise ToolError(f"the agent refused: {problem}") from problem

    async def _answer(self, request: SendMessageRequest) -> Answer:
        if self._client is None:
            http = httpx.AsyncClient(headers=headers_of(self.config), timeout=None)
            self._client = await create_client(self.config["url"], ClientConfig(httpx_client=http, polling=True))
        async for event in self._client.send_message(request):
            if event.HasField("message"):
                self.context_id, self.task_id = event.message.context_id or self.context_id, event.message.task_id
                return Answer(content_of(event.message.parts), "message", MessageToDict(event.message.metadata))
            self.task_id = event.task.id or event.status_update.task_id or event.artifact_update.task_id
        while True:
            task = await self._client.get_task(GetTaskRequest(id=self.task_id))
            state = TaskState.Name(task.status.state).removeprefix("TASK_STATE_").lower()
            if state not in ("submitted", "working", "unspecified"):
                break
            await asyncio.sleep(POLL_S)
        self.context_id, self.task_id = task.context_id, task.id if state == "input_required" else ""
        message = task.status.message
        parts = [part for artifact in task.artifacts for part in artifact.parts] if state == "completed" else []
        metadata = {**MessageToDict(task.metadata), **MessageToDict(message.metadata)}
        answer = Answer(content_of(parts or message.parts), state, metadata)
        if state in ("failed", "auth_required"):
            raise ToolError(f"the agent's task ended as {state}: {answer.content.text or 'it gave no reason'}")
        return answer

    async def cancel(self) -> None:
        """Cancel the open task, if any."""
        task_id, self.task_id = self.task_id, ""
        if task_id and self._client is not None:
            with contextlib.suppress(A2AError, httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(5):
                    await self._client.cancel_task(CancelTaskRequest(id=task_id))

    async def close(self) -> None:
        """End the conversation."""
        await self.cancel()
        if self._client is not None:
            await self._client.close()


def headers_of(config: dict[str, Any]) -> dict[str, str]:
    """Return the headers of all requests, also to other addresses in the card; `token_env` names the token's variable."""
    token = os.environ[config["token_env"]] if "token_env" in config else None
    return {**config.get("headers", {}), **({} if token is None else {"Authorization": f"Bearer {token}"})}


def content_of(parts: Any) -> ToolResponse:
    """Return an agent's parts as text and images."""
    texts, images = [], []
    for part in parts:
        if part.HasField("raw") and part.media_type.startswith("image/"):
            images.append(f"data:{part.media_type};base64,{base64.b64encode(part.raw).decode()}")
        elif part.HasField("data"):
            texts.append(json.dumps(MessageToDict(part.data), ensure_ascii=False))
        else:
            texts.append(part.text or part.url or f"({part.filename or part.media_type or 'a file'}, which cannot be shown)")
    return ToolResponse(text="\n".join(texts), image=images or None)


def skill_of(config: dict[str, Any]) -> AgentSkill:
    """Return the skill `skill` of the agent's card, or its only one."""
    url = config["url"].rstrip("/") + "/.well-known/agent-card.json"
    try:
        data = httpx.get(url, headers=headers_of(config), timeout=30).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as problem:
        raise ConfigError(f"the A2A agent shows no card at {url}: {problem}") from problem
    skills = {skill.id: skill for skill in ParseDict(data, AgentCard(), ignore_unknown_fields=True).skills}
    name = config.get("skill", next(iter(skills)) if len(skills) == 1 else None)
    if name not in skills:
        raise ConfigError(
            f"the A2A agent at {config['url']} has the skills {sorted(skills)}; set `skill` to one, not {name!r}"
        )
    return skills[name]


class A2ATool(BaseTool):
    """One skill of an agent."""

    origin = Origin.ENVIRONMENT

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.from_a2a_skill(skill_of(config)))
        self._takes_text = self.schema["function"]["parameters"] == MESSAGE_PARAMETERS
        self._conversations: dict[str, Conversation] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        self._conversations[instance_id] = Conversation(self.config)
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        part = {"text": parameters["message"]} if self._takes_text else {"data": parameters}
        answer = await self._conversations[instance_id].ask(part, skill=self.config.get("skill", ""))
        if answer.state in ("rejected", "canceled"):
            raise ToolError(f"the agent {answer.state} the task: {answer.content.text or 'it gave no reason'}")
        return answer.content, 0.0, {"input_required": float(answer.state == "input_required")}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._conversations.pop(instance_id).close()


class A2AInteraction(BaseInteraction):
    """An agent that answers the model's turns, until its task ends or the metadata of an answer say `done`.

    `brief` in a row's `interaction_kwargs` precedes the first turn; `score` in the metadata is the turn's score.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._conversations: dict[str, Conversation] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        chosen = await super().start_interaction(instance_id)
        self._conversations[chosen] = Conversation(self.config)
        return chosen

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, Any, float, dict[str, Any]]:
        conversation, text = self._conversations[instance_id], messages[-1]["content"]
        if not conversation.context_id and kwargs.get("brief"):
            text = f"{kwargs['brief']}\n\n{text}"
        answer = await conversation.ask({"text": text})
        is_done = answer.state in ENDS or bool(answer.metadata.get("done"))
        content = answer.content if answer.content.image else answer.content.text
        return is_done, content, float(answer.metadata.get("score", 0.0)), {"state": answer.state}

    async def finalize_interaction(self, instance_id: str | None = None, **kwargs: Any) -> None:
        await self._conversations.pop(str(instance_id)).close()
