"""The methods and arguments of a user's class or function, read by `inspect.signature` when it is loaded.

    class Customer(BaseInteraction):
        async def respond(self, instance_id, messages, **kwargs): ...
    ->  ConfigError: Customer defines `respond`, but an interaction needs `generate_response`: did you mean that?

Without the check, a misspelt method would leave the base class's in its place. A method counts as defined where a class that
is not one of the kind's base classes defines it, so that classes may inherit from one another.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.core.reward import brief

_NEAR = 0.85
"""The similarity above which a name is taken for a misspelling of a method's."""
_FAR = 0.6
"""The similarity above which it is named in place of the first of several methods, where none of them is there."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The arguments that a method is called with."""

    num: int
    """Number of positional arguments it is given."""
    names: tuple[str, ...] = ()
    """Keyword arguments that it is always given."""
    write: str
    """Its signature, as a user writes it."""
    or_num: int | None = None
    """Number of positional arguments that it may also take, without any others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The methods of one kind of plug-in."""

    what: str
    """The kind with its article: "an interaction"."""
    needs: tuple[tuple[str, ...], ...]
    """Groups of methods; of each group a class must define one."""
    bases: tuple[type, ...] = ()
    """Classes whose methods are defaults that do not count as defined."""
    needs_alone: tuple[str, ...] = ()
    """Methods that a class must define as well that inherits none of the bases."""
    may_be_empty: bool = False
    """Whether a class without a method of its own is the default under another name, and as good."""
    calls: Mapping[str, CallShape] = field(default_factory=dict)
    """Methods that the library calls, and how."""
    also: tuple[str, ...] = ("snapshot", "restore")
    """Further methods that a class may define."""


def check_class(cls: type, shape: Shape, *, where: str = "") -> None:
    """Refuse a class that lacks what its kind needs, misspells it, or takes other arguments than it is called with.

    Args:
        cls: The class. One of the library's own is taken as it is.
        shape: The methods of its kind.
        where: The class's name in messages.

    Raises:
        ConfigError: the first problem found.
    """
    foreign = [c for c in cls.__mro__ if c not in shape.bases and not _is_ours(c)]
    if not foreign or cls in shape.bases:
        return
    name_of = f"{where}: {cls.__name__}" if where else cls.__name__
    own = [n for c in foreign for n, value in vars(c).items() if n[0] != "_" and _is_method(value)]
    known = {*shape.calls, *shape.also, *(n for group in shape.needs for n in group)}
    known |= {n for base in shape.bases for n in dir(base) if n[0] != "_"}
    strangers = [n for n in dict.fromkeys(own) if n not in known]

    alone = () if any(issubclass(cls, base) for base in shape.bases) else tuple((name,) for name in shape.needs_alone)
    needed = (() if shape.may_be_empty and not strangers else shape.needs) + alone
    is_open = any("__getattr__" in vars(c) for c in foreign)  # it answers to names that it does not list
    for group in needed:
        if is_open or any(_defines(cls, name, shape) for name in group):
            continue
        if strangers:
            stranger, name = max(((s, n) for s in strangers for n in group), key=lambda pair: _likeness(*pair))
            name = name if _likeness(stranger, name) >= _FAR else group[0]
            raise ConfigError(f"{name_of} defines `{stranger}`, but {shape.what} needs `{name}`: did you mean that?")
        example = f"; write `{shape.calls[group[0]].write}`" if group[0] in shape.calls else ""
        if group not in shape.needs:
            example = f"; inherit polyturn.{shape.bases[0].__name__}, which has it"
        raise ConfigError(f"{name_of} defines no `{group[0]}`, and {shape.what} needs it{example}")

    for name in strangers:
        likely = max(sorted(known), key=lambda n: _likeness(name, n))
        if likely not in own and _likeness(name, likely) >= _NEAR:
            raise ConfigError(
                f"{name_of} defines `{name}`, which nothing calls: did you mean `{likely}`? A helper of its own may be "
                f"called `_{name}`"
            )
    for name, call in shape.calls.items():
        if name in own:
            # `self` is an argument of an unbound method; static and class methods have none.
            unbound = (None,) if inspect.isfunction(inspect.getattr_static(cls, name)) else ()
            _check_call(getattr(cls, name), call, *unbound, where=f"{name_of}.{name}")


def check_function(function: Any, call: CallShape, *, where: str) -> None:
    """Refuse what is not a function, takes other arguments than it is called with, or yields where it should return.

    Args:
        function: The function, its options bound.
        call: How it is called.
        where: The function's name in messages.

    Raises:
        ConfigError: the first problem found.
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{where} is {brief(function)}, which is not a function; write `{call.write}`")
    _check_call(function, call, where=where)


def refuse_generator(function: Callable[..., Any], *, where: str) -> None:
    """Refuse a function with `yield`: a call of it returns a generator and no value.

    Raises:
        ConfigError: it is one.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where} has `yield` in it, so that a call of it gives nothing; write `return`")


def num_positional(function: Callable[..., Any]) -> int | None:
    """Return the number of positional arguments of `function`; None for any number, or an unknown one."""
    parameters = _parameters(function)
    if parameters is None or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in _POSITIONAL for p in parameters)


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name`."""
    return name in (p.name for p in _named(function))


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of `function` without a default, in their order."""
    return tuple(p.name for p in _named(function) if p.default is p.empty)


def lacks(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name` and no value for it: no default, or None."""
    return name in (p.name for p in _named(function) if p.default is p.empty or p.default is None)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Return whether `function` ends in `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function) or ())


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of `function`; None for one in C that does not tell them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _named(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in _parameters(function) or () if p.kind not in _STARS]


def _check_call(function: Callable[..., Any], call: CallShape, *own: None, where: str) -> None:
    refuse_generator(function, where=where)
    parameters = _parameters(function)
    if parameters is None:
        return
    signature = inspect.Signature(parameters)
    try:
        signature.bind(*own, *[None] * call.num, **dict.fromkeys(call.names))
    except TypeError as problem:
        if call.or_num is not None and _binds(signature, len(own) + call.or_num):
            return
        names = ", ".join(_STARS.get(p.kind, "") + p.name for p in parameters)
        raise ConfigError(
            f"{where} takes ({names}) and cannot be called as it is ({problem}); write `{call.write}`"
        ) from problem


def _binds(signature: inspect.Signature, num: int) -> bool:
    try:
        signature.bind(*[None] * num)
    except TypeError:
        return False
    return True


def _likeness(one: str, other: str) -> float:
    """Return the similarity of two names; 1 where only capitals, underscores, the order of letters or a cut word differ."""
    plain, others = (sorted(name.replace("_", "").lower().replace("calculate", "calc")) for name in (one, other))
    return 1.0 if plain == others else difflib.SequenceMatcher(None, one, other).ratio()


def _defines(cls: type, name: str, shape: Shape) -> bool:
    """Return whether `cls` has the method from a class that is not among the bases."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    if owner is None or owner in shape.bases or not callable(getattr(cls, name)):
        return False
    return not getattr(vars(owner)[name], "__isabstractmethod__", False)


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, staticmethod | classmethod)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("polyturn", "builtins", "abc", "typing")
