"""BaseTool: the base class for a tool with state. A tool without state is a function; see `function.py`.

One object serves every episode at once, so state of one episode lives under its instance id:

    create (once an episode) -> execute (each call) -> calc_reward (once, at the end) -> release (exactly once, always)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

from pydantic import ValidationError

from polyturn.core.errors import ConfigError
from polyturn.core.messages import Origin
from polyturn.core.protocols import Tool
from polyturn.tools.schema import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """A tool that accepts every call. Each method may also be a plain function; it then runs in a thread."""

    checks_own_arguments = False
    """True leaves arguments that do not fit the schema to `execute` instead of telling the model about them."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """Names that `create` and `execute` look up in their keyword arguments and in `parameters`, beside those that signature
    and schema name: `create_kwargs`, `agent_data`, further arguments of the model."""
    stateless: bool = False
    """Whether what it keeps of an episode comes from `create` alone, so that a conversation goes on after a restart; a tool
    with state may offer `snapshot` and `restore` instead (see `core/snapshots.py`)."""
    origin: ClassVar[Origin] = Origin.OWNER
    """The author of its schema; text of any other author becomes no control token."""
    waits_apart: ClassVar[bool] = False
    """Whether its calls wait for something with a deadline of its own, such as the start of a sandbox (`Stretch.paused`),
    which does not count for the deadline of the call."""
    base_key: ClassVar[str | None] = None
    """Key of its config that gets the folder from which relative paths start; None for a tool without paths."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ) -> None:
        self.config = config
        self.tool_schema: OpenAIFunctionToolSchema = read_schema(tool_schema)  # type: ignore[assignment]
        if tool_schema is None:
            self.tool_schema = read_schema(self.get_openai_tool_schema())  # type: ignore[assignment]
        if self.tool_schema is None:
            raise ConfigError(
                f"Tool schema is not set! Give {type(self).__name__} a `tool_schema` in its file, or return one from "
                "get_openai_tool_schema"
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema; override it for a class that brings its own."""
        return self.tool_schema

    @property
    def max_concurrency(self) -> int | None:
        """Number of its calls that run at once: `max_concurrency` in its config; None means no limit."""
        limit: int | None = self.config.get("max_concurrency")
        return limit

    @property
    def host(self) -> str | None:
        """The host that it asks, for the limit per host: host and port of the first URL in its config; None for none."""
        urls = (v for v in self.config.values() if isinstance(v, str) and v.startswith(("http://", "https://")))
        return next((urlsplit(url).netloc for url in urls), None)

    def fit_deadline(self, timeout_s: float) -> None:
        """Learn how long a call may take, before the first. A tool that runs what the model wrote ends it sooner: whatever
        is past its deadline is the tool's failure, and several close the tool to all episodes."""

    @property
    def schema(self) -> dict[str, Any]:
        """The whole schema as plain data, for chat templates."""
        return self.tool_schema.to_dict()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin one episode.

        Args:
            instance_id: The episode's id; None asks for a new one.
            kwargs: The row's `create_kwargs` for this tool.

        Returns:
            (the id that is used from then on, the text for the model at the start, empty for none).
            Just the id is fine too.
        """
        return (str(uuid4()) if instance_id is None else instance_id), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one call of the model; raise `ToolError` to tell it what went wrong.

        Args:
            instance_id: The episode.
            parameters: The arguments the model wrote.
            kwargs: The row's `execute_kwargs` for this tool.

        Returns:
            (response, step reward or None, metrics or None). Just the response is fine too; it is a `ToolResponse`,
            text, or a dict, which becomes JSON.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the reward of the tool's whole use in this episode; None for no opinion."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the episode and free what it held. Called exactly once per `create`.

        Also after a create that raised or was cancelled on its way, with the id that it was given; what this raises then
        counts for nothing.
        """


def read_schema(value: OpenAIFunctionToolSchema | Mapping[str, Any] | None) -> OpenAIFunctionToolSchema | None:
    """Return a schema from its plain form; a schema and None are returned as they are.

    Raises:
        ConfigError: it is not a tool schema.
    """
    if value is None or isinstance(value, OpenAIFunctionToolSchema):
        return value
    try:
        return OpenAIFunctionToolSchema.model_validate(value)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"])) or "tool_schema"
        raise ConfigError(
            f"tool_schema: {where}: {first['msg']}; write {{type: function, function: {{name, description, parameters}}}}"
        ) from problem


def check_names(tools: Iterable[Tool]) -> None:
    """Check that no two tools share a name.

    Raises:
        ConfigError: two do.
    """
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise ConfigError(f"Duplicate tool name '{tool.name}' found; the model calls tools by name, so rename one")
        seen.add(tool.name)
