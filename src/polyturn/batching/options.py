"""Options of micro-batches.

train: {layout: packed}
train: {layout: {name: rows, shared_prefix: off}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """The layout of samples in a micro-batch."""

    PART: ClassVar[str] = "any layout"

    name: Literal["auto", "rows", "packed"] = "auto"
    """rows: padded rows of similar length. packed: end to end without padding. auto packs on a GPU."""
    shared_prefix: Literal["auto", "off"] = "auto"
    """Compute the common prefix of samples in a micro-batch only once. auto does so if that saves enough."""
