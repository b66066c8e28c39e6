"""Calls between special marks, in one section: DeepSeek V3 and R1; V3.1 with a shorter form.

V3     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add
       ```json
       {"a": 2}
       ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.json_calls import with_arguments
from polyturn.tokens.parsers.sections import read_sections
from polyturn.tokens.parsers.xml import check_name

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"


@parsers.register("deepseekv3")
class DeepSeekV3Parser(TurnParser):
    """See the head of the file."""

    call_tags = _CALL
    default_reasoning = "deepseek-r1"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the sections."""
        return read_sections(text, _SECTION, _CALL, _read_v3)


@parsers.register("deepseekv31")
class DeepSeekV31Parser(TurnParser):
    """See the head of the file."""

    call_tags = _CALL
    default_reasoning = "deepseek-v3"

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the sections."""
        return read_sections(text, _SECTION, _CALL, _read_v31)


def _read_v3(text: str, raw: str) -> ToolCall:
    form = f"function{_SEPARATOR}NAME, a line break, then the arguments between ```json and ```"
    _, separator, rest = text.partition(_SEPARATOR)
    name, _, code = rest.partition("\n")
    name, code = name.strip(), code.strip()
    wrong = check_name(name if separator else "", raw, form)
    if wrong is not None:
        return wrong
    if not (code.startswith("```") and code.endswith("```") and len(code) >= 6):
        return broken(raw, f"the arguments are not between ```json and ```; write {form}", name=name)
    return with_arguments(name, code[3:-3].removeprefix("json"), raw)


def _read_v31(text: str, raw: str) -> ToolCall:
    name, separator, arguments = text.partition(_SEPARATOR)
    name = name.strip()
    form = f"NAME{_SEPARATOR}{{…}}"
    return check_name(name if separator else "", raw, form) or with_arguments(name, arguments, raw)
