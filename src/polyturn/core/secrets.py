"""Finds secrets in configurations and text, hides them from logs and records, and reads tokens from the environment.

    hide("no such key: s3cr3t", "s3cr3t")                           ->  "no such key: ***"
    masked({"api_key": "sk-1", "url": "http://me:pw@host/x"})       ->  {"api_key": "***", "url": "http://***@host/x"}
    token_from({"token_env": "SEARCH_TOKEN"}, where="tools.yaml")   ->  "s3cr3t", from the environment

Configurations are masked by key names. A client hides the token that it sent, because servers quote requests in errors.
"""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

SHOWN = "***"
"""Replaces a secret."""
MIN_SECRET = 6
"""Known secrets of fewer characters are not searched for, because such short texts occur by chance."""
PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables of the trainer that processes with a user's code inherit."""

_NAME = re.compile(
    r"^(token|pass|auth|bearer|oauth|pat)$"
    r"|(^|[_.-])((auth|access|api|bearer|csrf|hf|hub|id|refresh|secret|session)[_-]?tokens?|api[_-]?keys?|secrets?|jwt|pwd?"
    r"|(secret|access|private|encryption|signing)[_-]?(access[_-]?)?keys?|passw(or)?ds?|passphrase|(db|user)[_-]?pass"
    r"|credentials?|cookies?|(basic|http|proxy)[_-]auth|authorization)$"
    r"|(?-i:^([A-Z0-9_]*(TOKEN|API_?KEY|SECRET|SECRET_(ACCESS_)?KEY|PASSWORD|CREDENTIALS)|([A-Z0-9_]+_)?(PASS|PAT))$)",
    re.IGNORECASE,
)
_KEYS = r"(?:api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd|pwd|pw)"
_FLAG = r"(?<![\w-])--(?:[\w-]+-)?(?:token|api-key|secret|password)"
_QUERY = r"([?&](?:token|api[_-]?key|key|access_token|(?:client_)?secret|password|sig|(?:x-\w+-)?signature)=)[^&\s'\"]+"
_NEW = r"(?!\*\*\*|\$\{)"
"""Skips values that are already hidden, and expressions such as ${oc.env:NAME}."""
_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(://)[^/@\s'\"]+(?=@)",
        _QUERY,
        r"(authorization['\"]*\s*[:=]\s*['\"]*(?:(?:bearer|basic|token)\s+|(?=[^\s'\",}]{16}))"
        rf"|x-api-key\s*[:=]\s*(?=[^\s'\",}}]{{16}})){_NEW}[^\s'\",}}]+",
        r"\b(bearer\s+)(?!\*\*\*)(?=[^\s'\",}]*[\d._~+/=-])[\w.~+/=-]{6,}",
        rf"\b({_KEYS}['\"]?\s*(?:=\s*['\"]?|:\s*['\"])){_NEW}[^\s'\",;&}}\])]{{3,}}",
        # An unquoted YAML value ends its line or entry, as in `{client_secret: X}`; in prose, more words follow.
        rf"(?<![\w-])({_KEYS}['\"]?\s*:\s+){_NEW}(?!(?:null|true|false)\b)[^\s'\",{{}}\[\]]{{3,}}(?=\s*(?:[,}}\]\n]|\Z))",
        rf"({_FLAG}[ =]){_NEW}[^\s'\"]{{3,}}",
        # At least 16 characters with a digit, to tell a secret from a token of a vocabulary.
        rf"(\btoken['\"]?\s*[:=]\s*['\"]?){_NEW}(?=[\w.~+/-]*\d)[\w.~+/-]{{16,}}",
        # Hide the whole cookie header, because any of its parts between semicolons may be secret, whatever its name.
        r"((?:set-)?cookie['\"]*\s*[:=]\s*['\"]*)[^\s;'\",}]+(?:;\s*[^\s;'\",}]+)*",
        r"\b()(?-i:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsru]_[A-Za-z0-9]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}"
        r"|AKIA[0-9A-Z]{16})",
    )
)
"""Each match keeps its first group; the rest of the match is hidden."""
_ONLY_SCHEME = re.compile(r"\A(\s*(?:bearer|basic)\s+)(?!\$\{)\S+\s*\Z", re.IGNORECASE)
"""Matches a text that is nothing but the value of an Authorization header ("Bearer s3cr3t"), under any key."""


def is_secret_name(name: str) -> bool:
    """Return whether a key or variable with this name holds a secret: api_key, auth_token, HF_TOKEN; not eos_token."""
    return name not in ("PWD", "OLDPWD") and _NAME.search(name) is not None


def masked(value: Any, *, is_secret: bool = False) -> Any:
    """Replace every secret in plain data: values of keys and flags with a secret's name, and secrets in URLs.

    Expressions such as ${oc.env:NAME} stay.
    """
    if isinstance(value, Mapping):
        return {k: masked(v, is_secret=is_secret or is_secret_name(str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        flags = [isinstance(word, str) and re.fullmatch(_FLAG, word, re.IGNORECASE) for word in (None, *value)]
        return [masked(v, is_secret=is_secret or bool(flag)) for v, flag in zip(value, flags, strict=False)]
    if is_secret:
        is_shown = value is None or isinstance(value, bool) or value == "" or str(value).startswith("${")
        return value if is_shown else SHOWN
    return _ONLY_SCHEME.sub(rf"\1{SHOWN}", hide(value)) if isinstance(value, str) else value


def hide(text: str, *secrets: str | None) -> str:
    """Hide `secrets` in a text, and the secrets in its URLs, headers, flags and assignments."""
    # Longest first: if one secret is part of another, hiding the shorter one first would leave pieces of the longer.
    for secret in sorted({s for s in secrets if s and len(s) >= MIN_SECRET}, key=len, reverse=True):
        text = text.replace(secret, SHOWN)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{SHOWN}", text)
    return text


def secrets_in_query(url: str) -> tuple[str, ...]:
    """Return the secrets in a URL's query, as written and decoded: `?key=s3cr3t` gives s3cr3t."""
    values = [match[0].removeprefix(match[1]) for match in re.finditer(_QUERY, url, re.IGNORECASE)]
    return tuple(dict.fromkeys([*values, *map(urllib.parse.unquote_plus, values)]))


def secret_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of all variables whose name is that of a secret."""
    return tuple(value for name, value in environ.items() if is_secret_name(name))


def scrubbed(text: str) -> str:
    """Hide the secrets of this process's environment in a text, and those that `hide` finds."""
    return hide(text, *secret_variables(os.environ))


def passed_on(*also: str) -> dict[str, str]:
    """Return the environment variables among `PASSED_ON` and `also` that are set."""
    return {name: os.environ[name] for name in (*PASSED_ON, *also) if name in os.environ}


def token_from(settings: Mapping[str, Any], *, where: str) -> str | None:
    """Return the setting `token`, or the environment variable that `token_env` names; None if neither is set.

    Raises:
        ConfigError: the variable is not set, both settings are present, or the token is not text.
    """
    from polyturn.core.errors import ConfigError  # `errors` imports this module

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


class HideSecrets(logging.Filter):
    """Hides secrets in log records, tracebacks included; add it to a handler, which sees the records of all loggers."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Hide the values of all variables whose name is that of a secret, and the secrets that `hide` finds."""
        super().__init__()
        self._secrets = secret_variables(environ)

    def filter(self, record: logging.LogRecord) -> bool:
        """Hide secrets in the record, and keep it."""
        try:
            message = record.getMessage()
        except Exception:  # a wrong format, or an argument whose `__str__` raises
            return True  # the handler reports the formatting error
        hidden = hide(message, *self._secrets)
        if hidden != message:
            record.msg, record.args = hidden, ()
        if record.exc_info and record.exc_text is None:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = hide(record.exc_text, *self._secrets)
        return True
