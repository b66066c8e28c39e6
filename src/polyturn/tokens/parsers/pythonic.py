"""Calls as a Python list: Llama 4, LFM 2 and others. The parser limits size and depth, and never evaluates code.

[add(a=2, b=[1, {"k": None}]), now()]
<|python_start|>[add(a=2)]<|python_end|>            <|tool_call_start|>[add(a=2)]<|tool_call_end|>

Without tags, a line is a call only if it begins with `[name()` or `[name(key=`.
"""

from __future__ import annotations

import re
from typing import Any

from polyturn.core.messages import ToolCall
from polyturn.tokens.parsers.base import ParsedText, Tools, TurnParser, broken, parsers
from polyturn.tokens.parsers.json_calls import MAX_DEPTH

MAX_CHARS = 1 << 20
"""The most characters of a list of calls; longer lists are not parsed."""
_NAME = r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+"
_OPEN = re.compile(r"<\|(?:python_start|tool_call_start|python_tag)\|>")
_CLOSE = re.compile(r"<\|(?:python_end|tool_call_end)\|>")
_BARE = re.compile(rf"^[ \t]*+\[\s*+{_NAME}\s*+\(\s*+(?:\)|[^\W\d]\w*+\s*+=)", re.MULTILINE)
_TOKEN = re.compile(
    rf"""\s*+(?:(?P<string>[rRuU]?(?:'''(?:[^\\']++|\\.|'(?!''))*+'''|\"\"\"(?:[^\\"]++|\\.|"(?!""))*+\"\"\"
    |'(?:[^\\']++|\\.)*+'|"(?:[^\\"]++|\\.)*+"))
    |(?P<number>[-+]?(?:[0-9][0-9_]*+(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?)
    |(?P<name>{_NAME})|(?P<mark>[\[\](){{}},:=]))""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
}


@parsers.register("lfm2")
@parsers.register("pythonic")
class PythonicParser(TurnParser):
    """See the head of the file."""

    def read(self, text: str, tools: Tools) -> ParsedText:
        """Read the list after a tag, or the first line that is a list."""
        tag = _OPEN.search(text)
        if tag is not None:
            calls = read_python_calls(text[tag.end() :], tag=tag[0])
            return ParsedText([text[: tag.start()], *calls.pieces], calls.calls)
        start = _BARE.search(text)
        if start is None:
            return ParsedText([text], [])
        calls = read_python_calls(text[start.start() :])
        return ParsedText([text[: start.start()], *calls.pieces], calls.calls)


def read_python_calls(text: str, *, tag: str = "") -> ParsedText:
    """Parse lists of calls up to the first error; the rest of the text becomes one broken call."""
    pieces: list[str] = []
    calls: list[ToolCall] = []
    position = 0
    if len(text) > MAX_CHARS:
        return ParsedText(pieces, [broken(text, f"the tool calls have {len(text)} characters, more than {MAX_CHARS}")])
    while True:
        reader = _TokenReader(text, position)
        try:
            reader.read_list(calls)
        except BadPythonError as problem:
            form = "write [NAME(KEY=VALUE, …)] with values that are literals"
            raw = text[reader.call_start :].rstrip() or tag or text.strip()
            calls.append(broken(raw, f"the tool call cannot be read ({problem}); {form}", name=reader.call_name))
            return ParsedText(pieces, calls)
        position = reader.position
        closed = _CLOSE.match(text, position)
        position = position if closed is None else closed.end()
        again = _OPEN.search(text, position)
        if again is None:
            pieces.append(text[position:])
            return ParsedText(pieces, calls)
        pieces.append(text[position : again.start()])
        position = again.end()


class BadPythonError(Exception):
    """Text that is not a list of calls; the message says why, for the model."""


class _TokenReader:
    """Reads tokens from left to right, each once."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self.call_start = position
        self.call_name = ""

    def read_list(self, calls: list[ToolCall]) -> None:
        """Append the calls of `[f(…), g(…)]`, or the single call `f(…)`, to `calls`."""
        is_list = self._take("[")
        while True:
            calls.append(self._read_call())
            self.call_start, self.call_name = self.position, ""
            if not is_list:
                return
            has_comma = self._take(",")
            if self._take("]") or not (has_comma or self._rest()):  # without ], the text ends after a call
                return
            if not has_comma:
                raise BadPythonError(f"expected , or ] at {self._here()}")

    def _read_call(self) -> ToolCall:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        self.call_start = self.position
        name = self._next("name", "a tool's name")
        self.call_name = name.removesuffix(".call")
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            key = self._next("name", "KEY=VALUE")
            self._expect("=")
            if key in arguments:
                raise BadPythonError(f"the argument {key!r} occurs twice")
            arguments[key] = self._read_value(1)
            if not self._take(","):
                self._expect(")")
                break
        raw = self.text[self.call_start : self.position]
        return ToolCall(id="", name=self.call_name, arguments=arguments, raw=raw)

    def _read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise BadPythonError(f"nested too deeply, more than {MAX_DEPTH} levels")
        token = self._token()
        kind = token.lastgroup
        if kind == "string":
            return self._strings(token["string"])
        if kind == "number":
            return _number(token["number"])
        if kind == "name" and token["name"] in _WORDS:
            return _WORDS[token["name"]]
        if token[kind or 0] in ("[", "("):
            return self._read_items("]" if token["mark"] == "[" else ")", depth)
        if token[kind or 0] == "{":
            return self._read_dict(depth)
        raise BadPythonError(f"expected a literal value, found {token[kind or 0][:40]!r}")

    def _read_items(self, close: str, depth: int) -> Any:
        items: list[Any] = []
        has_comma = False
        while not self._take(close):
            items.append(self._read_value(depth + 1))
            has_comma = self._take(",")
            if not has_comma:
                self._expect(close)
                break
        return items[0] if close == ")" and len(items) == 1 and not has_comma else items

    def _read_dict(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not self._take("}"):
            key = self._read_value(depth + 1)
            if not isinstance(key, str):
                raise BadPythonError(f"the keys of a dict must be strings, not {str(key)[:40]}")
            self._expect(":")
            out[key] = self._read_value(depth + 1)
            if not self._take(","):
                self._expect("}")
                break
        return out

    def _strings(self, first: str) -> str:
        """Return the string `first`, joined with the string literals that directly follow it, as in Python."""
        parts = [_unquote(first)]
        while (token := _TOKEN.match(self.text, self.position)) is not None and token.lastgroup == "string":
            self.position = token.end()
            parts.append(_unquote(token["string"]))
        return "".join(parts)

    def _token(self) -> re.Match[str]:
        token = _TOKEN.match(self.text, self.position)
        if token is None:
            is_string = self.text[self.position : self.position + 2].strip()[:1] in ("'", '"')
            raise BadPythonError(
                "a string is not closed; the text is cut off" if is_string else f"cannot read {self._here()}"
            )
        self.position = token.end()
        return token

    def _next(self, kind: str, what: str) -> str:
        at = self._here()
        token = self._token()
        if token.lastgroup != kind:
            raise BadPythonError(f"expected {what} at {at}")
        return token[kind]

    def _expect(self, mark: str) -> None:
        if not self._take(mark):
            raise BadPythonError(f"expected {mark} at {self._here()}")

    def _take(self, mark: str) -> bool:
        token = _MARK.match(self.text, self.position)
        if token is None or token[1] != mark:
            return False
        self.position = token.end()
        return True

    def _rest(self) -> bool:
        """Return whether anything but white space follows."""
        return _SPACE.match(self.text, self.position).end() < len(self.text)  # type: ignore[union-attr]  # it always matches

    def _here(self) -> str:
        rest = self.text[self.position : self.position + 30]
        return repr(rest) if rest else "the end; the text is cut off"


_SPACE = re.compile(r"\s*+")
_MARK = re.compile(r"\s*+([\[\](){},:=])")


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except (ValueError, OverflowError) as problem:
        raise BadPythonError(f"{text[:40]!r} is not a number") from problem
    if value in (float("inf"), float("-inf")):
        raise BadPythonError(f"{text[:20]} is too large")
    return value


def _unquote(text: str) -> str:
    is_raw = text[0] in "rR"
    text = text.lstrip("rRuU")
    width = 3 if text[:3] in ("'''", '"""') and len(text) >= 6 else 1
    body = text[width:-width]
    return body if is_raw or "\\" not in body else _ESCAPE.sub(_unescape, body)


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number <= 0x10FFFF else match[0]
    return chr(int(code, 8)) if code[0] in "01234567" else match[0]
