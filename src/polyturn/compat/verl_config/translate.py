"""Translates verl's keys: the translation with verl's table, its converters and the keys of its releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyturn.compat.verl_config.convert import CONVERTERS
from polyturn.compat.verl_config.table import is_of_verl, release_keys, table, wrong_kind
from polyturn.config.translate import translation
from polyturn.config.translate.table import KeyRule
from polyturn.config.translate.translation import Translation
from polyturn.config.translate.tree import Composed, leaves
from polyturn.core.errors import did_you_mean


def translate(tree: Composed) -> Translation:
    """Translate a composed tree.

    Raises:
        ConfigError: a key is unknown, unsupported, or contradicts another; one line each.
    """
    return translation.translate(tree, keys=table(), converters=CONVERTERS, check=_unknown_keys, wrong_kind=wrong_kind)


def _unknown_keys(tree: Composed, key: str, value: Any, row: KeyRule) -> list[str]:
    """Return a sentence for each written key of an ignored section that no release has."""
    is_section = "**" in row.key or isinstance(value, Mapping)
    if not is_section or row.ignored is None or row.key.startswith(("hydra", "**")):
        return []
    written = [".".join((key, *path)) for path, _ in leaves(value)]
    return [
        f"unknown key {k!r}{tree.where(k)}: no release of verl has it.{did_you_mean(k, release_keys())}"
        for k in written
        if tree.is_written(k) and not is_of_verl(k)
    ]
