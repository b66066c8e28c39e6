"""Checks the methods and arguments of a user's class or function when it is loaded.

    class Customer(BaseInteraction):
        async def respond(self, instance_id, messages, **kwargs): ...
    ->  ConfigError: Customer defines `respond`, but an interaction needs `generate_response`: did you mean that?

Without the check, a misspelt method would silently leave the default of the base class in effect. A class defines a method
if it or one of its parents does, not counting the base classes of the kind.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.code_origin import defined_at
from polyturn.core.errors import ConfigError
from polyturn.core.reward import brief

_NEAR = 0.85
"""The similarity (0 to 1) from which an unknown name counts as a misspelt method."""
_FAR = 0.6
"""If no method of a required group is defined, the message suggests the method most similar to an unknown name, or the
group's first method if the similarity (0 to 1) is below this."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The arguments that the library passes to a method."""

    num: int
    """Number of positional arguments."""
    names: tuple[str, ...] = ()
    """Keyword arguments that are always passed."""
    write: str
    """The signature to write, for messages."""
    or_num: int | None = None
    """Another number of positional arguments that the method may take, without keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The methods of one kind of plug-in."""

    what: str
    """The kind with its article: "an interaction"."""
    needs: tuple[tuple[str, ...], ...]
    """Groups of methods; a class must define at least one of each group."""
    bases: tuple[type, ...] = ()
    """Classes whose methods are defaults that do not count as defined."""
    needs_alone: tuple[str, ...] = ()
    """Further methods that a class must define if it inherits from none of the bases."""
    may_be_empty: bool = False
    """Whether a class may define no method at all and so use every default."""
    calls: Mapping[str, CallShape] = field(default_factory=dict)
    """Method name -> the arguments that the library passes."""
    also: tuple[str, ...] = ("snapshot", "restore")
    """Further methods that a class may define."""


def check_class(cls: type, shape: Shape, *, where: str = "") -> None:
    """Refuse a class with a missing or misspelt method, or a method that does not take the arguments it is called with.

    Args:
        cls: The class. Classes of the library are not checked.
        shape: The methods of its kind.
        where: The source of the class, for messages.

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
    is_open = any("__getattr__" in vars(c) for c in foreign)  # may have methods that it does not list
    for group in needed:
        if is_open or any(_defines(cls, name, shape) for name in group):
            continue
        if strangers:
            stranger, name = max(((s, n) for s in strangers for n in group), key=lambda pair: _likeness(*pair))
            name = name if _likeness(stranger, name) >= _FAR else group[0]
            raise ConfigError(
                f"{name_of} defines `{stranger}`, but {shape.what} needs `{name}`: did you mean that?"
                f"{defined_at(getattr(cls, stranger))}"
            )
        example = f"; write `{shape.calls[group[0]].write}`" if group[0] in shape.calls else ""
        if group not in shape.needs:
            example = f"; inherit polyturn.{shape.bases[0].__name__}, which has it"
        raise ConfigError(f"{name_of} defines no `{group[0]}`, and {shape.what} needs it{example}{defined_at(cls)}")

    for name in strangers:
        likely = max(sorted(known), key=lambda n: _likeness(name, n))
        if likely not in own and _likeness(name, likely) >= _NEAR:
            raise ConfigError(
                f"{name_of} defines `{name}`, which nothing calls: did you mean `{likely}`? A helper of its own may be "
                f"called `_{name}`{defined_at(getattr(cls, name))}"
            )
    for name, call in shape.calls.items():
        if name in own:
            # `self` is an argument of an unbound method; static and class methods have none.
            unbound = (None,) if inspect.isfunction(inspect.getattr_static(cls, name)) else ()
            _check_call(getattr(cls, name), call, *unbound, where=f"{name_of}.{name}")


def check_function(function: Any, call: CallShape, *, where: str) -> None:
    """Refuse an object that is not a function, does not take the arguments of `call`, or is a generator.

    Args:
        function: The function, with its options bound.
        call: The arguments that it is called with.
        where: The name of the function in messages.

    Raises:
        ConfigError: the first problem found.
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigError(
            f"{where} is {brief(function)}, which is not a function; write `{call.write}`{defined_at(function)}"
        )
    _check_call(function, call, where=where)


def refuse_generator(function: Callable[..., Any], *, where: str) -> None:
    """Refuse a function with `yield`: calling it returns a generator instead of a value.

    Raises:
        ConfigError: the function is a generator.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{where} contains `yield`, so a call returns a generator and not a value; write `return`{defined_at(function)}"
        )


def num_positional(function: Callable[..., Any]) -> int | None:
    """Return the number of positional arguments of `function`; None if it takes any number or has no known signature."""
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
    """Return whether `function` has a parameter called `name` whose default is missing or None."""
    return name in (p.name for p in _named(function) if p.default is p.empty or p.default is None)


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Return whether `function` ends in `**kwargs`."""
    return any(p.kind is p.VAR_KEYWORD for p in _parameters(function) or ())


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of `function`; None if it has no signature, as some functions in C."""
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
            f"{where} takes ({names}) and cannot be called as it is ({problem}); write `{call.write}`{defined_at(function)}"
        ) from problem


def _binds(signature: inspect.Signature, num: int) -> bool:
    try:
        signature.bind(*[None] * num)
    except TypeError:
        return False
    return True


def _likeness(one: str, other: str) -> float:
    """Return the similarity of two names, 0 to 1.

    It is 1 if they differ only in capitals, underscores, the order of letters, or "calc" for "calculate".
    """
    plain, others = (sorted(name.replace("_", "").lower().replace("calculate", "calc")) for name in (one, other))
    return 1.0 if plain == others else difflib.SequenceMatcher(None, one, other).ratio()


def _defines(cls: type, name: str, shape: Shape) -> bool:
    """Return whether `cls` has a concrete method `name` that does not come from one of the kind's bases."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    if owner is None or owner in shape.bases or not callable(getattr(cls, name)):
        return False
    return not getattr(vars(owner)[name], "__isabstractmethod__", False)


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, staticmethod | classmethod)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("polyturn", "builtins", "abc", "typing")
