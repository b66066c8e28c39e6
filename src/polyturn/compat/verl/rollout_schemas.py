"""verl.workers.rollout.schemas: messages and enums of states, for code that imports them.

Message(role="user", content="2+2?").model_dump()
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from pydantic import BaseModel

from polyturn.compat.not_offered import __getattr__  # noqa: F401  (raises for names that are not offered)
from polyturn.compat.verl.tool_schemas import OpenAIFunctionToolCall
from polyturn.tools.schema import ToolResponse

BASE_CHAT_HISTORY = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "I am a user."},
]


class FinishReasonTypeEnum(str, Enum):  # noqa: UP042  (users see the text of a member)
    """Why generation stopped."""

    LENGTH = "length"
    STOP = "stop"
    TOOL_CALL = "tool_calls"

    @classmethod
    def from_str(cls, value: str) -> FinishReasonTypeEnum:
        """Return the member with this text.

        Raises:
            ValueError: there is no such member.
        """
        for member in cls:
            if member.value == value:
                return member
        raise ValueError(f"Unsupported finish reason type: {value}")


class AsyncRolloutRequestStateEnum(str, Enum):  # noqa: UP042
    """The states of a request."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    TOOL_CALLING = "tool_calling"
    INTERACTING = "interacting"


class TokenizationSanityCheckModeEnum(str, Enum):  # noqa: UP042
    """How strictly ids are compared with a full render."""

    DISABLE = "disable"
    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"


class VerlMessage(BaseModel):
    """One message of a conversation."""

    role: str
    content: str | dict[str, Any] | list[dict[str, Any]] | ToolResponse
    tool_calls: list[OpenAIFunctionToolCall] | None = None


Message = VerlMessage  # the name in users' imports
