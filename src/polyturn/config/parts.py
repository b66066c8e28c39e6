"""Section, which every section of a configuration is; and parts of a run: written by a name alone, or with options.

    loss: gspo                                            loss: {name: gspo}
    loss: {name: gspo, clip_high: 4.0e-4}                 the options are those of this loss

The options of each of our parts are a dataclass beside it, which `name` tells from the others. A user's own part is
an `OwnPart`, whose further keys are its arguments. Options say with `PART` what they are of; their keys are listed and
counted apart from those that every run has. A string under a field is that key's meaning: the reference, `polyturn config`
and errors show it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from polyturn.algorithms.options import by_name
from polyturn.config import schema
from polyturn.core.live import NameOrObject

# A section's validator is built when it is first used: for most sections inside the whole run's, and never by an import.
_COMMON = ConfigDict(
    defer_build=True, frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
)


class Section(BaseModel):
    """A section of a configuration; an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(**_COMMON, extra="forbid")


class OwnPart(BaseModel):
    """A part that another package or a file of yours has. Further keys are its arguments."""

    model_config = ConfigDict(**_COMMON, extra="allow")

    name: NameOrObject
    """A registered name, `package.module:Attr` or `file.py:Attr`."""


class ByName:
    """In an annotation of several options: read a text as the name, and take the options that the name is of."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def tag(value: Any) -> str:
            of = type(value) if schema.is_model(type(value)) else schema.meant(source, value)
            return cast(str, of.__name__)

        # Tagged by our own rule: pydantic would try every member and report the errors of all of them.
        choices = {member.__name__: handler.generate_schema(member) for member in schema.unwrap(source)}
        return core_schema.no_info_before_validator_function(
            by_name, core_schema.tagged_union_schema(choices, discriminator=tag)
        )


BY_NAME = ByName()


def arguments_of(part: Any, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Return the arguments of a part: the options of its own that are set, except those named in `but`."""
    if isinstance(part, OwnPart):
        arguments = {name: getattr(part, name) for name in type(part).model_fields if name != "name"} | (
            part.model_extra or {}
        )
    else:
        arguments = {field.name: getattr(part, field.name) for field in dataclasses.fields(part) if field.name != "name"}
        arguments = {name: value for name, value in arguments.items() if value is not None}
    return {name: value for name, value in arguments.items() if name not in but}
