"""What every section of a configuration has in common: frozen, strict about its keys, documented under each field.

A string under a field is that key's meaning: the reference, `polyturn config` and errors show it.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of a configuration; an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )
