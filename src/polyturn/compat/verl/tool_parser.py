"""verl.experimental.agent_loop.tool_parser: `ToolParser` and `FunctionCall`, on top of the native parsers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel

from polyturn.core.errors import UnknownNameError, did_you_mean
from polyturn.tokens.parsers import parsers
from polyturn.tools.schema import OpenAIFunctionToolSchema

_Class = TypeVar("_Class", bound="type[ToolParser]")


class FunctionCall(BaseModel):
    """A call of the model, with its arguments as JSON text."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Parses the tool calls in the ids of one turn."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text without its calls, and the calls."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Additional ids at which generation stops."""
        return []

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """Return a registered or native parser by name.

        Raises:
            UnknownNameError: the name is unknown.
        """
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        if name in parsers:
            return NativeToolParser(tokenizer, name)
        raise UnknownNameError(f"Unknown tool parser: {name}.{did_you_mean(name, [*cls._registry, *parsers])}")

    @classmethod
    def register(cls, name: str) -> Callable[[_Class], _Class]:
        """Return a decorator that registers a class."""

        def add(subclass: _Class) -> _Class:
            cls._registry[name] = subclass
            return subclass

        return add


class NativeToolParser(ToolParser):
    """One of polyturn's parsers. Calls inside reasoning, and calls that cannot be parsed, are left out."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        super().__init__(tokenizer)
        self._parser = parsers.resolve(name)()

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the text without its calls, and the calls."""
        ids = list(responses_ids)
        if ids and ids[-1] == getattr(self.tokenizer, "eos_token_id", None):
            ids.pop()
        return self._calls(self.tokenizer.decode(ids, skip_special_tokens=False), tools)

    def _calls(self, text: str, tools: Sequence[Any] | None) -> tuple[str, list[FunctionCall]]:
        schemas = [t.to_dict() if isinstance(t, OpenAIFunctionToolSchema) else t for t in tools or ()]
        parsed = self._parser.parse(text, tools=schemas)
        calls = [
            FunctionCall(name=c.name, arguments=json.dumps(dict(c.arguments), ensure_ascii=False), tool_call_id=c.id)
            for c in parsed.tool_calls
            if c.error is None
        ]
        return parsed.content, calls


class HermesToolParser(NativeToolParser):
    """Parses calls as JSON in `<tool_call>`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, "hermes")


class GptOssToolParser(NativeToolParser):
    """Parses calls in the channels of gpt-oss."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, "gpt-oss")


class Qwen3XMLToolParser(NativeToolParser):
    """Parses calls as `<function=name><parameter=key>…`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, "qwen3_coder")

    def _parse_xml_function_call(self, function_call_str: str, tools: Sequence[Any] | None) -> FunctionCall | None:
        """Return the call after `<function=`, without a value that was cut off; None if it cannot be parsed."""
        whole = function_call_str[: _end_of_values(function_call_str)]
        calls = self._calls(f"<tool_call>\n<function={whole}\n</function>\n</tool_call>", tools)[1]
        return calls[0].model_copy(update={"tool_call_id": None}) if calls else None


class KimiToolParser(NativeToolParser):
    """Parses calls between the markers of Kimi K2, each with its id."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, "kimi_k2")

    def _calls(self, text: str, tools: Sequence[Any] | None) -> tuple[str, list[FunctionCall]]:
        """Return the text and its calls; an unknown name becomes the only tool name that it contains, if there is one."""
        content, calls = super()._calls(text, tools)
        names = {_name_of(tool) for tool in tools or ()}
        for call in calls:
            matches = [name for name in names if name in call.name.replace("-", "_")]
            if call.name not in names and len(matches) == 1:
                call.name = matches[0]
        return content, calls


def _name_of(tool: Any) -> str:
    return str(tool.function.name if isinstance(tool, OpenAIFunctionToolSchema) else tool["function"]["name"])


def _end_of_values(call: str) -> int:
    """Return the end of the last complete value of a call; the call's length if all values are closed."""
    opened, closed = call.rfind("<parameter="), call.rfind("</parameter>")
    return opened if opened > closed else len(call)
