"""A2ATool: an agent that speaks A2A, as a tool (the extra `a2a`).

    - class_name: polyturn.tools.a2a.A2ATool
      config: {type: native, url: "http://127.0.0.1:9000", timeout: 60}          every skill of its card is one tool
    - class_name: polyturn.tools.a2a.A2ATool
      config: {type: native, url: "http://…/agent-card.json", skill: book_flight}          this one alone

The calls of an episode are one conversation with the agent. A skill says what it takes in words alone, so the model writes
a message; a skill whose description carries a JSON schema, as those made of our tools do, gets the arguments as data.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from polyturn.core.errors import ConfigError, ToolError, did_you_mean
from polyturn.core.messages import Origin
from polyturn.core.secrets import token_from
from polyturn.tools.a2a_client import A2AAgent
from polyturn.tools.a2a_parts import A2AConversation
from polyturn.tools.base import BaseTool
from polyturn.tools.schema import MESSAGE_PARAMETERS, OpenAIFunctionToolSchema, ToolResponse


class A2ATool(BaseTool):
    """Asks an agent. Config: `url`, `skill`, `token` or `token_env`, `headers`, `timeout` 60 seconds for an answer."""

    origin = Origin.ENVIRONMENT

    def __init__(self, config: dict[str, Any], tool_schema: Any = None, *, agent: A2AAgent | None = None) -> None:
        """Build the tool of one skill.

        Args:
            config: See the class.
            tool_schema: What the model sees; None reads it off the agent's card.
            agent: One that is shared; None makes one from the config.
        """
        self.agent = agent or agent_of(config)
        self.skill: str = config.get("skill", "")
        self.timeout: float = config.get("timeout", 60)
        if not isinstance(self.timeout, int | float) or self.timeout <= 0:
            raise ConfigError(f"timeout is {self.timeout!r}; it must be a positive number of seconds")
        super().__init__(config, tool_schema if tool_schema is not None else self._schema_of_card())
        self._takes_text = self.schema["function"]["parameters"] == MESSAGE_PARAMETERS
        self._conversations: dict[str, A2AConversation] = {}

    def _schema_of_card(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.from_a2a_skill(choose_skill(self.agent.read_card(), self.skill, url=self.agent.url))

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin one episode; nothing is said yet."""
        instance_id = str(uuid4()) if instance_id is None else instance_id
        self.agent.open()
        self._conversations[instance_id] = A2AConversation()
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Send the model's message, or its arguments, and return the agent's answer.

        Raises:
            ToolError: the agent refused or failed.
            ToolTimeoutError, ToolConnectionError: it was late, or cannot be reached.
        """
        part: dict[str, Any] = {"text": parameters["message"]} if self._takes_text else {"data": parameters}
        conversation = self._conversations[instance_id]
        answer = await self.agent.ask(conversation, **part, skill=self.skill, timeout_s=self.timeout)
        if answer.state in ("rejected", "canceled"):
            raise ToolError(f"the agent {answer.state} the task: {answer.text or 'it gave no reason'}")
        needs_more = answer.state == "input_required"
        response = ToolResponse(text=answer.text, image=list(answer.images) or None)
        return response, 0.0, {"input_required": float(needs_more)}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> None:
        """Have no opinion: asking is neither paid nor charged."""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the conversation: a task that waits for more is cancelled."""
        self.agent.leave(self._conversations.pop(instance_id))
        await self.agent.close()


def agent_of(config: dict[str, Any]) -> A2AAgent:
    """Return the agent that a config names.

    Raises:
        ConfigError: it names none.
    """
    if "url" not in config:
        raise ConfigError("an A2A agent needs a `url`: its address, or that of its card")
    return A2AAgent(config["url"], token=token_from(config, where="the A2A agent"), headers=config.get("headers"))


def choose_skill(card: Any, name: str, *, url: str) -> Any:
    """Return the skill of a card by its id; the only one where no name is given.

    Raises:
        ConfigError: there is no such skill, or there are several to choose from.
    """
    known = {skill.id: skill for skill in card.skills}
    if not name and len(known) == 1:
        return next(iter(known.values()))
    if name not in known:
        reason = f"has no skill {name!r}" if name else "has several skills, or none; choose with `skill`"
        raise ConfigError(f"the A2A agent at {url} {reason}.{did_you_mean(name, known)}")
    return known[name]


def build_a2a_tools(cls: type[A2ATool], config: dict[str, Any], tool_schema: Any) -> list[A2ATool]:
    """Return the tool of the config's skill, or one for each skill of the agent's card; they share the agent.

    Raises:
        ConfigError: the card cannot be had, or has no skill.
    """
    if config.get("skill") or tool_schema is not None:
        return [cls(config, tool_schema)]
    agent = agent_of(config)
    skills = list(agent.read_card().skills)
    if not skills:
        raise ConfigError(f"the A2A agent at {agent.url} lists no skill; give the item a tool_schema")
    return [
        cls({**config, "skill": skill.id}, OpenAIFunctionToolSchema.from_a2a_skill(skill), agent=agent) for skill in skills
    ]
