"""Section, the base of all sections; and parts of a run, written as a bare name or with options.

    loss: gspo                                            loss: {name: gspo}
    loss: {name: gspo, clip_high: 4.0e-4}                 with the options of this loss

The options of each built-in part are a dataclass, chosen by `name`. A user's part is an `OwnPart`, whose further keys are
its arguments. `PART`, set on options, labels their keys in the reference and in `polyturn config`. The string under
a field describes the key in the reference, in `polyturn config` and in errors.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from polyturn.algorithms.options import by_name
from polyturn.config import schema
from polyturn.infra.live import NameOrObject

# A section's validator is built on first use, usually as part of the whole run's, never at import.
_COMMON = ConfigDict(
    defer_build=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
)


class Section(BaseModel):
    """A section of a configuration. Unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(**_COMMON, extra="forbid")


class OwnPart(BaseModel):
    """A part from another package or from your file. Further keys are its arguments."""

    model_config = ConfigDict(**_COMMON, extra="allow")

    name: NameOrObject
    """A registered name, `package.module:Attr` or `file.py:Attr`."""


class ByName:
    """Annotation of a union of options: read a text as the name, and choose the options by name."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def tag(value: Any) -> str:
            of = type(value) if schema.is_model(type(value)) else schema.meant(source, value)
            return cast(str, of.__name__)

        # Tagged by this function, because pydantic would otherwise try every member and report the errors of all.
        choices = {member.__name__: handler.generate_schema(member) for member in schema.unwrap(source)}
        return core_schema.no_info_before_validator_function(
            by_name, core_schema.tagged_union_schema(choices, discriminator=tag)
        )


BY_NAME = ByName()


def arguments_of(part: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a part: its options that are set, except those in `but`."""
    arguments = {name: getattr(part, name) for name in schema.keys_of(cast(Any, type(part)))}
    if isinstance(part, OwnPart):
        arguments |= part.model_extra or {}
    else:
        arguments = {name: value for name, value in arguments.items() if value is not None}
    return {name: value for name, value in arguments.items() if name not in ("name", *but)}
