"""The log level of a run: our own environment variable, or the one that scripts for another library set."""

from __future__ import annotations

from collections.abc import Mapping

from polyturn.core.plugins import NAMESPACES, offered

OWN = "POLYTURN_LOG_LEVEL"
_OF_OTHERS = "_LOGGING_LEVEL"
"""The end of the variable of a library that polyturn stands in for, behind its name."""
_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL"}


def log_level(environ: Mapping[str, str], default: str = "INFO") -> str:
    """Return the name of the level that the environment asks for: `log_level({"POLYTURN_LOG_LEVEL": "warn"})` is WARNING."""
    ends = [name for name in environ if name.endswith(_OF_OTHERS)]
    theirs = [f"{name.upper()}{_OF_OTHERS}" for name in offered(NAMESPACES)] if ends else []
    level = next((environ[name] for name in (OWN, *theirs) if environ.get(name)), default).strip().upper()
    return _ALIASES.get(level, level)
