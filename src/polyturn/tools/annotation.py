"""The annotation of a tool's parameter: its JSON schema for the model, and the conversion of the model's argument.

    json_type(Colour | None, where="...")                     {"type": "string", "enum": ["red", "blue"], "nullable": True}
    read_argument(adapter, "red", name="wall", tool="paint")  Colour.RED

Both use pydantic. The schema has the format of transformers' `get_json_schema`, for which chat templates are written.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema

from polyturn.core.errors import PLUGIN_RAISES, ConfigError, one_line
from polyturn.tools.failures import ArgumentError
from polyturn.tools.validate import dotted, show

AS_WRITTEN = (str, int, float, bool, list, dict, Any)
"""Annotations for which the function gets the model's JSON value unchanged: 2 for a float stays an integer."""
Types = dict[str, TypeAdapter[Any]]


def json_type(hint: Any, *, where: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """Return the type adapter of an annotation, and its JSON schema without references.

    Raises:
        ConfigError: pydantic cannot make a JSON schema for it; the message begins with `where`.
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(hint)
        return adapter, adapter.json_schema(schema_generator=_ToolSchema)
    except PLUGIN_RAISES as problem:  # pydantic raises almost anything for types that it does not know
        why = one_line(problem).partition(". ")[0]  # drops the advice to authors of types
        raise ConfigError(
            f"{where} has the annotation {hint!r}, which has no JSON form ({why}); use str, int, float, bool, list, dict, "
            "Literal, Optional, an Enum, a dataclass, a pydantic model, or give the tool a schema"
        ) from problem


def read_argument(adapter: TypeAdapter[Any], value: Any, *, name: str, tool: str) -> Any:
    """Convert the model's JSON to the annotated type, such as a member of an enum, a date, or an object of a class.

    Raises:
        ArgumentError: the value does not fit; the message is for the model.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as problem:
        fault = problem.errors(include_url=False)[0]
        path = dotted((name, *fault["loc"]))
        raise ArgumentError(f"{path!r}: {fault['msg']}, not {show(fault['input'])} (tool {tool!r})") from problem


class _ToolSchema(GenerateJsonSchema):
    """Generates schemas with inlined definitions, `nullable: true` for optional values, and a type list for plain unions."""

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        form = super().generate_inner({key: value for key, value in schema.items() if key != "ref"})
        form.pop("discriminator", None)  # it refers to definitions, which are inlined here
        if "const" in form:
            form["enum"] = [form.pop("const")]
        if form.get("title") == getattr(schema.get("cls"), "__name__", ""):
            del form["title"]
        if (each := form.get("prefixItems")) and "items" not in form and all(one == each[0] for one in each):
            form["items"] = form.pop("prefixItems")[0]
        if schema["type"] in ("model", "dataclass", "typed-dict"):  # a misspelt field is an error, as in the call itself
            form.setdefault("additionalProperties", False)
        first = {"type": form["type"]} if "type" in form else {}
        return first | {k: v for k, v in form.items() if (k, v) not in (("items", {}), ("additionalProperties", True))}

    def definitions_schema(self, schema: Any) -> dict[str, Any]:
        self._known = {one["ref"]: one for one in schema["definitions"]}
        return self.generate_inner(schema["schema"])

    def definition_ref_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(self._known[schema["schema_ref"]])

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def union_schema(self, schema: Any) -> dict[str, Any]:
        form = super().union_schema(schema)
        options = form.get("anyOf", [{}])
        is_plain = all(o.keys() == {"type"} and isinstance(o["type"], str) for o in options)
        return {"type": [o["type"] for o in options]} if is_plain else form

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: Any, parent_key: str | None = None) -> Any:
        return value
