"""Options of the advantage estimators, generated from the signatures of their functions.

    advantage: {name: grpo, norm_by_std: false}                          GroupOptions
    advantage: {name: gae, lam: 0.95}                                    GaeOptions

The annotation of an argument has its range and its description. A null argument takes the function's default.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from polyturn.algorithms import advantages


class EstimatorOptions(BaseModel):
    """The advantage estimator: one of docs/algorithms.md, or your own."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", allow_inf_nan=False)

    PART: ClassVar[str] = "any estimator"
    """The name of the part in messages."""

    name: str


def _options(class_name: str, *names: str, default: str | None = None) -> type[EstimatorOptions]:
    """Create the options class of the estimators `names`, with the arguments of the first one's function."""
    function = getattr(advantages, names[0])
    hints, fields = get_type_hints(function, include_extras=True), dict[str, Any]()
    text = "A registered estimator, or `file.py:function`."
    fields["name"] = (Literal[names], ... if default is None else Field(default, description=text))  # type: ignore[valid-type]
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and argument.name != "state":
            kind, *notes = get_args(hints[argument.name])
            annotation = Annotated[(kind | None, *notes)]  # type: ignore[valid-type]
            fields[argument.name] = (annotation, argument.default if kind is bool else None)
    return create_model(class_name, __base__=EstimatorOptions, __module__=__name__, **fields)


# Each class has the name of its variable, because pickle finds classes by name.
GroupOptions = _options("GroupOptions", "grpo", default="grpo")
GroupOptions.__doc__ = "Compares a reward with the other rewards of its group."
PassAtKOptions = _options("PassAtKOptions", "grpo_passk")
PlainEstimatorOptions = _options("PlainEstimatorOptions", "dr_grpo", "rloo", "opo", "remax")
MaxRlOptions = _options("MaxRlOptions", "maxrl")
BaselineOptions = _options("BaselineOptions", "reinforce_plus_plus_baseline")
ReinforceOptions = _options("ReinforceOptions", "reinforce_plus_plus")
GpgOptions = _options("GpgOptions", "gpg")
RaeOptions = _options("RaeOptions", "rae")
HierarchicalGrpoOptions = _options("HierarchicalGrpoOptions", "hierarchical_grpo")
GdpoOptions = _options("GdpoOptions", "gdpo")
GaeOptions = _options("GaeOptions", "gae", "turn_gae")
BilevelGaeOptions = _options("BilevelGaeOptions", "bilevel_gae")
ReturnToGoOptions = _options("ReturnToGoOptions", "return_to_go")
MtGrpoOptions = _options("MtGrpoOptions", "mt_grpo")
GigpoOptions = _options("GigpoOptions", "gigpo")

if TYPE_CHECKING:
    NamedEstimatorOptions = EstimatorOptions
else:
    NamedEstimatorOptions = Union[  # noqa: UP007 - made of values
        GroupOptions, PassAtKOptions, PlainEstimatorOptions, MaxRlOptions, BaselineOptions, ReinforceOptions, GpgOptions,
        RaeOptions, HierarchicalGrpoOptions, GdpoOptions, GaeOptions, BilevelGaeOptions, ReturnToGoOptions, MtGrpoOptions,
        GigpoOptions,
    ]  # fmt: skip
    """Options of the shipped estimators; a configuration without a name gets the first."""
