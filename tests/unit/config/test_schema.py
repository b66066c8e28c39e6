"""The table of every key, as help and documentation show it."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from polyturn.config.load import schema_table


class Base(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Optim(Base):
    """How weights move.

    More about it.
    """

    lr: float = 1e-6
    """Learning rate,
    per step."""
    betas: tuple[float, float] = (0.9, 0.99)


class Node(Base):
    child: Node | None = None
    size: int


class Policy(Enum):
    STOP = "stop"
    GO_ON = "go_on"


class Run(Base):
    mode: Literal["a", "b"] = "a"
    """What to do."""
    policy: Policy = Policy.STOP
    optim: Optim = Optim()
    sets: dict[str, Optim] = {}
    rewards: list[Optim] = []
    files: str | list[str] | None = None
    node: Node | None = None


def test_every_key_has_a_row_with_type_default_and_doc() -> None:
    assert [row[:4] for row in schema_table(Run)] == [
        ("mode", "'a' | 'b'", '"a"', "What to do."),
        ("policy", "'stop' | 'go_on'", '"stop"', ""),
        ("optim", "section", "", "How weights move."),
        ("optim.lr", "float", "1e-06", "Learning rate, per step."),
        ("optim.betas", "tuple[float, float]", "[0.9, 0.99]", ""),
        ("sets", "dict[str, Optim]", "{}", "How weights move."),
        ("sets.<name>.lr", "float", "1e-06", "Learning rate, per step."),
        ("sets.<name>.betas", "tuple[float, float]", "[0.9, 0.99]", ""),
        ("rewards", "list[Optim]", "[]", "How weights move."),
        ("rewards[].lr", "float", "1e-06", "Learning rate, per step."),
        ("rewards[].betas", "tuple[float, float]", "[0.9, 0.99]", ""),
        ("files", "str | list[str] | null", "null", ""),
        ("node", "section", "null", ""),
        ("node.child", "section", "null", ""),
        ("node.size", "int", "required", ""),
    ]
