"""Bounds on what a chat template may do, counted in steps and never in seconds: a render always ends, and the same way.

Jinja's sandbox bounds `range`, and not loops in loops, macros that call themselves twice, or `'x' * 10**10`. Here a turn of
a loop, a call of a macro, and each 1,024 characters that the template makes or writes are steps. Code that Jinja generates
counts them, in a line per loop and a call per sum; what can make a value larger than its arguments is counted where it is
called. Nothing else in a template can repeat, or grow.

transformers prepares the variables of a template and renders it. It is given a template that hands those variables to
`render`, which renders the one that was asked for.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

from jinja2 import Environment, Template, TemplateRuntimeError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 10_000
"""The steps of a render, beside one for each character of its messages and tools, and ten for each pair of messages."""
_CHARS_A_STEP = 1024
_MAX_PRODUCT = 2**27
"""The estimated size of a result up to which it is made, where the input is small; it is counted once it is made."""
_FORMATS = frozenset({"format", "format_map", "strftime_now"})
_MAX_TERMS = 16
_WIDE = re.compile(r"\d{5}|\*|\{[^}]*\{")
_HARMLESS_METHODS = frozenset(
    {"capitalize", "casefold", "copy", "count", "endswith", "find", "get", "index", "isalnum", "isalpha", "isdigit"}
    | {"islower", "isnumeric", "isspace", "isupper", "items", "keys", "lower", "lstrip", "partition", "removeprefix"}
    | {"removesuffix", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"}
    | {"swapcase", "title", "upper", "values"}
)
_HARMLESS_FILTERS = frozenset(
    {"abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last"}
    | {"length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select", "selectattr"}
    | {"sort", "title", "trim", "truncate", "unique", "upper", "wordcount"}
)
_NAMES_OF_DICTS = frozenset(dir(dict))
_METHODS = (BuiltinMethodType, FunctionType, MethodType)


@functools.lru_cache(maxsize=128)
def bounded(source: str) -> Any:
    """Return what transformers takes for a chat template: it renders `source` within the bounds."""
    function = nodes.ImportedName(f"{__name__}.{render.__name__}")
    call = nodes.Call(function, [nodes.Const(source), nodes.ContextReference()], [], None, None)
    return nodes.Template([nodes.Output([call], lineno=1)], lineno=1)


def render(source: str, context: Context) -> str:
    """Render the template `source` with the variables of `context`, in an environment like its own.

    Raises:
        TemplateRuntimeError: the template takes more steps than it may.
    """
    template = _compiled(source, context.environment)
    given, own = context.environment.globals, template.environment.globals
    variables = {n: own[n] if n in own and value is given.get(n) else value for n, value in context.parent.items()}
    inner: Any = template.new_context(variables, shared=True)
    inner.eval_ctx.bounds = _Bounds(variables.get("messages"), variables.get("tools"))
    return inner.eval_ctx.bounds.write(template.root_render_func(inner))  # type: ignore[no-any-return]


class _Bounds:
    """The budget that is left of one render."""

    def __init__(self, messages: Any, tools: Any) -> None:
        self._input = (messages, tools)
        self._steps = chain(repeat(None, MAX_STEPS), self._more())
        self.step = self._steps.__next__

    def _more(self) -> Iterator[None]:
        more = len(repr(self._input)) + 10 * len(self._input[0] or ()) ** 2
        yield from repeat(None, more)
        raise TemplateRuntimeError(f"it takes more than {MAX_STEPS + more:,} steps; does it end?")

    def spend(self, num_chars: int) -> None:
        """Count characters that are made."""
        num_steps = num_chars // _CHARS_A_STEP
        if num_steps > 0:
            next(islice(self._steps, min(num_steps, 2**40) - 1, None))

    def made(self, value: Any) -> Any:
        """Count a value."""
        if value.__class__ is not str:
            self.spend(self.size(value))
        elif len(value) >= _CHARS_A_STEP:
            self.spend(len(value))
        return value

    def add(self, left: Any, right: Any) -> Any:
        """Count what a sum adds to the larger of its terms."""
        total = left + right
        self.made(min(left, right, key=len) if isinstance(total, list | tuple) else total)
        return total

    def size(self, value: Any) -> int:
        """Return about how many characters a value takes when it is written; each item of a container is a step."""
        total, rest = 0, [value]
        while rest:
            item = rest.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, int):
                total += item.bit_length() // 64 * _CHARS_A_STEP
            elif isinstance(item, dict | list | tuple):
                self.step()
                total += 8 * len(item)
                rest += item
                rest += item.values() if isinstance(item, dict) else ()
            elif isinstance(item, range):
                total += 64 * len(item)
        return total

    def concat(self, pieces: list[str]) -> str:
        """Join what a macro or a block wrote."""
        self.spend(sum(map(len, pieces)))
        return "".join(pieces)

    def write(self, pieces: Iterable[str]) -> str:
        """Join what the template writes, counting as it does."""
        pieces, written = iter(pieces), []
        while some := list(islice(pieces, 256)):
            written.append(self.concat(some))
        return "".join(written)

    def expect(self, name: str, value: Any, args: tuple[Any, ...]) -> None:
        """Refuse a call whose result, at most about its value times its arguments, would be too large."""
        if name == "replace" and isinstance(value, str) and len(args) > 1:
            return self.spend(len(value) + value.count(str(args[0])) * len(str(args[1])))
        is_format = name in _FORMATS and isinstance(value, str)
        if is_format and _WIDE.search(value):
            raise TemplateRuntimeError(f"it asks for a text of any width with {value[:40]!r}")
        size = max(1, len(value) if name == "tojson" and isinstance(value, dict | list) else self.size(value))
        times = 1 + sum(abs(a) if isinstance(a, int) and not is_format else self.size(a) for a in args)
        if size * times > _MAX_PRODUCT and size * times > _CHARS_A_STEP * len(repr(self._input)):
            raise TemplateRuntimeError(f"it makes a value of up to {size * times:,} characters with {name!r}")


class _Generator(CodeGenerator):
    """Writes code that counts: `step()` in each loop and macro, `made(…)` around each sum."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("bounds = context.eval_ctx.bounds")
        self.writeline("step, made, add, concat = bounds.step, bounds.made, bounds.add, bounds.concat")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802  (Jinja's names)
        node.body.insert(0, nodes.ExprStmt(_STEP, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.Or(_STEP, node.test)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> Any:
        node.body.insert(0, nodes.ExprStmt(_STEP, lineno=node.lineno))
        return super().macro_body(node, frame)

    def visit_Block(self, node: nodes.Block, frame: Frame) -> None:  # noqa: N802
        self.fail("a chat template has no blocks", node.lineno)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        terms: list[nodes.Expr] = []
        first: nodes.Expr = node
        while isinstance(first, nodes.Add) and len(terms) < _MAX_TERMS:
            terms.insert(0, first.right)
            first = first.left
        is_text = any(isinstance(term, nodes.Const) and isinstance(term.value, str) for term in (first, *terms))
        self.write("(text if len(text := " if is_text else "add(" * len(terms))
        self.visit(first, frame)
        for term in terms:
            self.write(" + " if is_text else ", ")
            self.visit(term, frame)
            self.write("" if is_text else ")")
        self.write(f") < {_CHARS_A_STEP} else made(text))" if is_text else "")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        while len(node.nodes) > _MAX_TERMS:
            groups = [node.nodes[i : i + _MAX_TERMS] for i in range(0, len(node.nodes), _MAX_TERMS)]
            node.nodes = [nodes.Concat(group, lineno=node.lineno, environment=self.environment) for group in groups]
        self._made(super().visit_Concat, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        self._made(super().visit_Tuple, node, frame)

    def _made(self, visit: Callable[[Any, Frame], None], node: Any, frame: Frame) -> None:
        is_stored = isinstance(node, nodes.Tuple) and node.ctx != "load"
        if is_stored or all(isinstance(item, nodes.Const) for item in node.iter_child_nodes()):
            return visit(node, frame)
        self.write("made(")
        visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%"})

    @classmethod
    def like(cls, other: Environment) -> _Environment:
        """Return one with the other's syntax, filters and globals."""
        own = cls(
            trim_blocks=other.trim_blocks,
            lstrip_blocks=other.lstrip_blocks,
            extensions=[type(extension) for extension in other.extensions.values()],
        )
        own.tests.update(other.tests)
        own.filters = {n: f if n in _HARMLESS_FILTERS else _counted(n, f) for n, f in other.filters.items()}
        own.globals = {n: f if isinstance(f, type) else _counted(n, f) for n, f in other.globals.items()}
        own.globals["lipsum"] = None
        given: dict[str, Any] = other.globals
        own.globals["namespace"] = type("namespace", (given["namespace"],), {"__repr__": lambda _: "<Namespace>"})
        dict_: Any = own.globals["dict"]
        dict_.fromkeys = _counted("fromkeys", given["dict"].fromkeys)
        return own

    def getattr(self, obj: Any, attribute: str) -> Any:
        if obj.__class__ is dict and attribute not in _NAMES_OF_DICTS:  # sooner than Jinja, which looks for a method first
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        value = super().getattr(obj, attribute)
        return value if attribute in _HARMLESS_METHODS or not isinstance(value, _METHODS) else _counted(attribute, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        try:
            return obj[argument]
        except (TypeError, LookupError):
            if isinstance(argument, str) and not (obj.__class__ is dict and argument not in _NAMES_OF_DICTS):
                value = super().getitem(obj, argument)
                return _counted(argument, value) if isinstance(value, _METHODS) else value
        return self.undefined(obj=obj, name=argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        bounds: _Bounds = context.eval_ctx.bounds  # type: ignore[attr-defined]
        if isinstance(left, int) and isinstance(right, int):
            if operator != "%":
                num_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                bounds.spend(num_bits * _CHARS_A_STEP // 64)
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            bounds.spend(bounds.size(value) * times if isinstance(times, int) else 0)
        elif operator == "%":
            bounds.expect("format", left, right if isinstance(right, tuple) else (right,))
        return bounds.made(super().call_binop(context, operator, left, right))


def _counted(name: str, function: Any) -> Any:
    """Return `function` for templates, counting what it returns; what one with the context calls is counted already."""
    asked = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    if asked == "context":
        return function
    method = inspect.unwrap(function)
    owner: tuple[Any, ...] = (method.__self__,) if isinstance(method, BuiltinMethodType) else ()

    @pass_eval_context
    @functools.wraps(function)
    def counted(eval_context: Any, *args: Any, **kwargs: Any) -> Any:
        bounds: _Bounds = eval_context.bounds
        if args and isinstance(args[0], Iterator):
            args = (list(args[0]), *args[1:])
        value, *rest = (*owner, *args, None)
        bounds.expect(name, value, (*rest, *kwargs.values()))
        given = {None: (), "eval_context": (eval_context,), "environment": (eval_context.environment,)}[asked]
        return bounds.made(function(*given, *args, **kwargs))

    return counted


@functools.lru_cache(maxsize=128)
def _compiled(source: str, environment: Environment) -> Template:
    return _Environment.like(environment).from_string(source)


_STEP = object.__new__(nodes.InternalName)
"""The call that counts, as an expression that is never true."""
nodes.Node.__init__(_STEP, "step()")
