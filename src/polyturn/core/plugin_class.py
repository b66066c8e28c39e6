"""The methods of a plug-in's class, checked when it is loaded: a misspelt one leaves the base class's in its place.

    class Customer(BaseInteraction):
        async def respond(self, instance_id, messages, **kwargs): ...
    ->  ConfigError: Customer defines `respond`, but an interaction needs `generate_response`: did you mean that?

Each kind of plug-in says in a `Shape` which methods it needs, which ones there are, and how each is called. A method counts
as defined where a class that is not one of the kind's base classes defines it, so that classes may inherit from one another.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.core.reward import shown

_NEAR = 0.85
"""The similarity above which a name is taken for a misspelling of a method's."""
_FAR = 0.6
"""The similarity above which it is named in place of the first of several methods, where none of them is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """The ways in which a method is called."""

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
        shape: What it must be.
        where: What names the class, for the message.

    Raises:
        ConfigError: the first problem found.
    """
    foreign = [c for c in cls.__mro__ if c not in shape.bases and not _is_ours(c)]
    if not foreign or cls in shape.bases:
        return
    prefix = f"{where}: " if where else ""
    known = {*shape.calls, *shape.also, *(n for group in shape.needs for n in group)}
    known |= {n for base in shape.bases for n in dir(base) if not n.startswith("_")}
    own = [n for c in foreign for n, value in vars(c).items() if not n.startswith("_") and _is_method(value)]
    strangers = [n for n in dict.fromkeys(own) if n not in known]
    is_open = any("__getattr__" in vars(c) for c in foreign)  # what it has is not known before it is asked
    needs = () if shape.may_be_empty and not strangers else shape.needs
    if not any(issubclass(cls, base) for base in shape.bases):
        needs += tuple((name,) for name in shape.needs_alone)
    for group in needs:
        if is_open or any(_defines(cls, name, shape) for name in group):
            continue
        if strangers:
            found, name = max(((s, n) for s in strangers for n in group), key=lambda pair: _likeness(*pair))
            name = name if _likeness(found, name) >= _FAR else group[0]
            raise ConfigError(
                f"{prefix}{cls.__name__} defines `{found}`, but {shape.what} needs `{name}`: did you mean that?"
            )
        example = f"; write `{shape.calls[group[0]].write}`" if group[0] in shape.calls else ""
        if group not in shape.needs:
            example = f"; inherit polyturn.{shape.bases[0].__name__}, which has it"
        raise ConfigError(f"{prefix}{cls.__name__} defines no `{group[0]}`, and {shape.what} needs it{example}")
    for name in strangers:
        likely = max(sorted(known), key=lambda n: _likeness(name, n))
        if likely not in own and _likeness(name, likely) >= _NEAR:
            raise ConfigError(
                f"{prefix}{cls.__name__} defines `{name}`, which nothing calls: did you mean `{likely}`? A helper of its "
                f"own may be called `_{name}`"
            )
    for name, call in shape.calls.items():
        if name in own:
            # `self` is an argument of what is not bound yet; a static method, or one of the class, has none.
            unbound = (None,) if inspect.isfunction(inspect.getattr_static(cls, name)) else ()
            _check_call(getattr(cls, name), call, *unbound, where=f"{prefix}{cls.__name__}.{name}")


def check_function(function: Any, call: CallShape, *, where: str) -> None:
    """Refuse what is no function, takes other arguments than it is called with, or yields where it should return.

    Args:
        function: The function, its options bound.
        call: How it is called.
        where: What names it, for the message.

    Raises:
        ConfigError: the first problem found.
    """
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{where} is {shown(function)}, which is no function; write `{call.write}`")
    _check_call(function, call, where=where)


def refuse_generator(function: Callable[..., Any], *, where: str) -> None:
    """Refuse a function with `yield`, which answers with itself, and not with what it yields.

    Raises:
        ConfigError: it is one.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where} has `yield` in it, so that a call of it gives nothing; write `return`")


def _check_call(function: Callable[..., Any], call: CallShape, *own: None, where: str) -> None:
    refuse_generator(function, where=where)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # nobody knows
    try:
        signature.bind(*own, *[None] * call.num, **dict.fromkeys(call.names))
    except TypeError as problem:
        if call.or_num is not None and _binds(signature, *own, *[None] * call.or_num):
            return
        names = ", ".join(_STARS.get(p.kind, "") + p.name for p in signature.parameters.values())
        raise ConfigError(
            f"{where} takes ({names}) and cannot be called as it is ({problem}); write `{call.write}`"
        ) from problem


def _likeness(one: str, other: str) -> float:
    """Return how like two names are; 1 where they differ in the order of their letters, capitals, underscores, or in a
    word that is cut short: `calc_score`, `calculateScore`."""
    plain, others = (sorted(name.replace("_", "").lower().replace("calculate", "calc")) for name in (one, other))
    return 1.0 if plain == others else difflib.SequenceMatcher(None, one, other).ratio()


def _binds(signature: inspect.Signature, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _defines(cls: type, name: str, shape: Shape) -> bool:
    """Return whether `cls` has the method from a class that is not among the bases; what cannot be called is no method."""
    owner = next((c for c in cls.__mro__ if name in vars(c)), None)
    if owner is None or owner in shape.bases or not callable(getattr(cls, name)):
        return False
    return not getattr(vars(owner)[name], "__isabstractmethod__", False)


def _is_method(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, staticmethod | classmethod)


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("polyturn", "builtins", "abc", "typing")
