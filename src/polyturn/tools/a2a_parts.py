"""Messages to and from an A2A agent, in this library's words and in the SDK's.

    request_of(conversation, "Paris to Rome", None, "")   ->  SendMessageRequest
    update_task(task, event)                              the task as its stream of events leaves it
    answer_of(parts, state="completed", metadata={})      ->  A2AAnswer("Two flights: …", images)

Separate from the connection because here nothing waits and nothing fails.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4


@dataclass(slots=True)
class A2AConversation:
    """The state of an episode's conversation with an agent."""

    context_id: str = ""
    """The agent's name for the conversation; empty until it has answered."""
    task_id: str = ""
    """The task that is not at its end; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class A2AAnswer:
    """The answer of an agent."""

    text: str
    images: tuple[str, ...] = ()
    """As data URLs."""
    state: str = "message"
    """The state of its task: completed, input_required, failed, rejected, canceled; `message` where it made none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The answer's fields beside the text."""


def request_of(conversation: A2AConversation, text: str, data: Mapping[str, Any] | None, skill: str) -> Any:
    """Return a `SendMessageRequest` with a text, data, or both."""
    from a2a.types import Message, Part, Role, SendMessageRequest
    from google.protobuf.json_format import ParseDict

    parts = [Part(text=text)] if text or data is None else []
    if data is not None:
        parts.append(ParseDict({"data": dict(data)}, Part()))
    message = Message(
        message_id=str(uuid4()),
        role=Role.ROLE_USER,
        parts=parts,
        context_id=conversation.context_id,
        task_id=conversation.task_id,
    )
    if skill:
        message.metadata.update({"skill_id": skill})
    return SendMessageRequest(message=message)


def update_task(task: Any, event: Any) -> None:
    """Bring a task up to date with one event of its stream."""
    if event.HasField("task"):
        task.CopyFrom(event.task)
    elif event.HasField("status_update"):
        task.id, task.context_id = event.status_update.task_id, event.status_update.context_id
        task.status.CopyFrom(event.status_update.status)
    elif event.HasField("artifact_update"):
        update = event.artifact_update
        known = next((a for a in task.artifacts if a.artifact_id == update.artifact.artifact_id), None)
        if known is None:
            task.artifacts.add().CopyFrom(update.artifact)
        elif update.append:
            known.parts.extend(update.artifact.parts)
        else:
            known.CopyFrom(update.artifact)


def state_of(task: Any) -> str:
    """Return a task's state: submitted, working, completed, …"""
    from a2a.types import TaskState

    return str(TaskState.Name(task.status.state)).removeprefix("TASK_STATE_").lower()


def answer_of(parts: Any, *, state: str, metadata: Any) -> A2AAnswer:
    """Return an agent's parts as text and images; metadata are a dict or a Struct."""
    texts, images = [], []
    for part in parts:
        if part.HasField("raw") and part.media_type.startswith("image/"):
            images.append(f"data:{part.media_type};base64,{base64.b64encode(part.raw).decode()}")
        else:
            texts.append(_text(part))
    data = metadata if isinstance(metadata, dict) else plain(metadata)
    return A2AAnswer(text="\n".join(t for t in texts if t), images=tuple(images), state=state, metadata=data)


def _text(part: Any) -> str:
    name = part.filename or part.media_type or "a file"
    if part.HasField("text"):
        return str(part.text)
    if part.HasField("data"):
        return json.dumps(plain(part.data), ensure_ascii=False)
    if part.HasField("url"):
        return f"{name}: {part.url}"
    return f"({name} of {len(part.raw)} bytes, which cannot be shown)" if part.HasField("raw") else ""


def plain(message: Any) -> Any:
    """Return a Struct or Value as plain data."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message)
