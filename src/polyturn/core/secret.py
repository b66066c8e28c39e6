"""Tokens of services: read from the environment or a file, and sent in a header.

    token_from({"token_env": "SEARCH_TOKEN"}, where="tools.yaml")   ->  "s3cr3t", from the environment
    bearer("s3cr3t")                                                ->  {"Authorization": "Bearer s3cr3t"}

How they are kept out of what is written and said is in `hiding.py`, whose names are found here too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from polyturn.core.errors import ConfigError
from polyturn.core.hiding import SHOWN as SHOWN
from polyturn.core.hiding import HideSecrets as HideSecrets
from polyturn.core.hiding import hide as hide
from polyturn.core.hiding import is_secret_name as is_secret_name
from polyturn.core.hiding import masked as masked
from polyturn.core.hiding import secret_variables as secret_variables


def token_from(settings: Mapping[str, Any], *, where: str) -> str | None:
    """Return the token that settings name: `token` itself, or `token_env`, a variable of the environment; None without.

    Raises:
        ConfigError: the variable is not set, both are given, or the token is no text.
    """
    token, name = settings.get("token"), settings.get("token_env")
    if token is not None and name is not None:
        raise ConfigError(f"{where} has `token` and `token_env`; give one of them")
    if name is not None:
        token = os.environ.get(name, "").strip() if isinstance(name, str) else ""
        if not token:
            raise ConfigError(f"{where} names the variable {name!r:.80}, which the environment does not have; set it")
    if token is None or token == "":
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where}: the token is not a text that a header can carry")
    return token


def bearer(token: str | None) -> dict[str, str]:
    """Return the headers that carry a token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}
