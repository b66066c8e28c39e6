"""How much a run says: our own environment variable, or the one that scripts for another library set."""

from __future__ import annotations

from collections.abc import Mapping

VARIABLES = ("POLYTURN_LOG_LEVEL", "VERL_LOGGING_LEVEL")
"""The first that is set counts."""
_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL"}


def log_level(environ: Mapping[str, str], default: str = "INFO") -> str:
    """Return the name of the level that the environment asks for: `log_level({"VERL_LOGGING_LEVEL": "warn"})` is WARNING."""
    given = next((environ[name] for name in VARIABLES if environ.get(name)), default).strip().upper()
    return _ALIASES.get(given, given)
