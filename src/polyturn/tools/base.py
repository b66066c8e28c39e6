"""BaseTool: the base class for a tool with state. A tool without state can be a function; see `function.py`.

One object serves all episodes, so a tool stores the state of each episode under its instance id:

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
    """The base of tools; its own `execute` accepts every call and does nothing.

    A subclass may define each method as a coroutine or as a plain function; plain functions run in threads.
    """

    checks_own_arguments = False
    """Whether `execute` checks arguments itself; otherwise the model gets an error if they do not fit the schema."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """Names that `create` and `execute` read although neither the signature nor the schema has them. `create_kwargs` and
    `agent_data` are then passed as keyword arguments; any other name is an argument that the model may give."""
    stateless: bool = False
    """Whether the tool's state in an episode comes from `create` alone and no call changes it, so that an episode can be
    resumed after a restart. A tool whose calls change state may offer `snapshot` and `restore` (`core/snapshots.py`)."""
    origin: ClassVar[Origin] = Origin.OWNER
    """The author of the schema. If it is not `Origin.OWNER`, control texts in the schema are encoded as ordinary text."""
    waits_apart: ClassVar[bool] = False
    """Whether a call may wait (inside `Stretch.paused`) for something that has its own deadline, such as the start of a
    sandbox. This waiting time does not count towards the deadline of the call."""
    base_key: ClassVar[str | None] = None
    """The config key that gets the folder against which the tool resolves relative paths; None for a tool without paths."""

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
        """Return the schema; override this in a class with a fixed schema."""
        return self.tool_schema

    @property
    def max_concurrency(self) -> int | None:
        """Maximum number of concurrent calls: `max_concurrency` in its config; None means no limit."""
        limit: int | None = self.config.get("max_concurrency")
        return limit

    @property
    def host(self) -> str | None:
        """Host and port of the first URL in its config, for the limit per host; None without a URL."""
        urls = (v for v in self.config.values() if isinstance(v, str) and v.startswith(("http://", "https://")))
        return next((urlsplit(url).netloc for url in urls), None)

    def fit_deadline(self, timeout_s: float) -> None:
        """Adapt the tool's own time limits to the deadline of each call; called before the first call.

        A tool that runs the model's code should stop the code before the deadline, because a missed deadline counts as a
        failure of the tool, and several failures open its circuit breaker for all episodes.
        """

    @property
    def schema(self) -> dict[str, Any]:
        """The whole schema as plain data, for chat templates."""
        return self.tool_schema.to_dict()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Start an instance for one episode.

        Args:
            instance_id: The episode's id; None for a new id.
            kwargs: The row's `create_kwargs` for this tool.

        Returns:
            (the id for all later calls, the opening message for the model or an empty one). Returning only the id is
            allowed.
        """
        return (str(uuid4()) if instance_id is None else instance_id), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer one call of the model; raise `ToolError` to show the model an error message.

        Args:
            instance_id: The id of the episode's instance.
            parameters: The arguments from the model.
            kwargs: The row's `execute_kwargs` for this tool.

        Returns:
            (response, step reward or None, metrics or None). Returning only the response is allowed. The response is a
            `ToolResponse`, text, or a dict, which becomes JSON.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return a reward for all uses of the tool in this episode; None for no reward."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the instance. Called exactly once per `create`.

        This includes a `create` that raised or was cancelled: `release` then gets the id that `create` received, and errors
        of this `release` are ignored.
        """


def read_schema(value: OpenAIFunctionToolSchema | Mapping[str, Any] | None) -> OpenAIFunctionToolSchema | None:
    """Convert a mapping to a schema; return a schema or None unchanged.

    Raises:
        ConfigError: the mapping is not a tool schema.
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
    """Check that the tools have different names.

    Raises:
        ConfigError: two tools have the same name.
    """
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise ConfigError(f"Duplicate tool name '{tool.name}' found; the model calls tools by name, so rename one")
        seen.add(tool.name)
