"""Secrets: how they are recognised, and how they are kept out of everything that is written or logged.

    hide("no such key: s3cr3t", "s3cr3t")                           ->  "no such key: ***"
    masked({"api_key": "sk-1", "url": "http://me:pw@host/x"})       ->  {"api_key": "***", "url": "http://***@host/x"}

Configurations are masked by the names of keys where they are written; whoever quotes what a server answered hides the token
that it was sent, because servers quote requests. Imports nothing of the library, because its errors need it.
"""

from __future__ import annotations

import logging
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Any

SHOWN = "***"
"""Stands where a secret was."""
MIN_SECRET = 6
"""Characters that a text needs to be hidden wherever it occurs; shorter ones occur by chance."""
_NAME = re.compile(
    r"^(token|pass|auth|bearer|oauth|pat)$|(^|[_.-])((auth|access|api|bearer|csrf|hf|hub|id|refresh|secret|session)[_-]?token|api[_-]?keys?|secrets?|"
    r"(secret|access|private|encryption|signing)[_-]?(access[_-]?)?key|password|passwd|passphrase|(db|user)[_-]?pass|pw|pwd|"
    r"credentials?|cookies?|set[_-]cookie|jwt|(basic|http|proxy)[_-]auth|(proxy[_-])?authorization)$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    r"^([A-Z0-9_]*(TOKEN|API_?KEY|SECRET|SECRET_(ACCESS_)?KEY|PASSWORD|CREDENTIALS)|([A-Z0-9_]+_)?(PASS|PAT))$"
)
_PLACES = frozenset({"PWD", "OLDPWD"})
"""Variables that hold a folder, whatever their names look like."""
_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_QUERY = re.compile(
    r"(?<=[?&])((?:token|api[_-]?key|key|access_token|secret|client_secret|password|sig|signature|x-\w+-signature)=)[^&\s'\"]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(bearer\s+)(?!\*\*\*)(?=[^\s'\",}]*[\d._~+/=-])[\w.~+/=-]{6,}", re.IGNORECASE)
_ONLY_SCHEME = re.compile(r"\A(\s*(?:bearer|basic)\s+)(?!\$\{)\S+\s*\Z", re.IGNORECASE)
"""A value that is what an Authorization header has, whatever name it stands under."""
_COOKIE = re.compile(r"((?:set-)?cookie['\"]*\s*[:=]\s*['\"]*)[^\s;'\",}]+(?:;\s*[^\s;'\",}]+)*", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"\b((?:api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd|pwd|pw)['\"]?\s*(?:=\s*['\"]?|:\s*['\"]))"
    r"(?!\*\*\*|\$\{)[^\s'\",;&}\])]{3,}",
    re.IGNORECASE,
)
_YAML = re.compile(
    r"(?<![\w-])((?:api[_-]?key|access[_-]?token|auth[_-]?token|client[_-]?secret|password|passwd|pwd|pw)['\"]?\s*:\s+)"
    r"(?!\*\*\*|\$\{|null\b|true\b|false\b)[^\s'\",{}\[\]]{3,}(?=\s*(?:[,}\]\n]|\Z))",
    re.IGNORECASE,
)
"""A value without quotes that ends the line or the entry, as in `{client_secret: X}`; prose goes on behind it."""
_ISSUED = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[opsru]_[A-Za-z0-9]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})"
)
"""Keys that can be told by how those who issue them begin them."""
_HEADER = re.compile(
    r"(authorization['\"]*\s*[:=]\s*['\"]*(?:(?:bearer|basic|token)\s+|(?=[^\s'\",}]{16}))|x-api-key\s*[:=]\s*(?=[^\s'\",}]{16}))"
    r"(?!\*\*\*|\$\{)[^\s'\",}]+",
    re.IGNORECASE,
)
_SECRET_FLAG = r"(?<![\w-])--(?:[\w-]+-)?(?:token|api-key|secret|password)"
_FLAG = re.compile(rf"({_SECRET_FLAG}[ =])(?!\*\*\*|\$\{{)[^\s'\"]{{3,}}", re.IGNORECASE)
_IS_FLAG = re.compile(_SECRET_FLAG, re.IGNORECASE)
_TOKEN = re.compile(r"(\btoken['\"]?\s*[:=]\s*['\"]?)(?!\*\*\*|\$\{)(?=[\w.~+/-]*\d)[\w.~+/-]{16,}", re.IGNORECASE)
"""A value behind the bare word, long and with a digit: what a token of a vocabulary, or one that is missing, is not."""


def is_secret_name(name: str) -> bool:
    """Return whether a key or variable of this name holds a secret: api_key, auth_token, HF_TOKEN; not eos_token."""
    return name not in _PLACES and (_NAME.search(name) is not None or _VARIABLE.match(name) is not None)


def masked(value: Any) -> Any:
    """Return plain data with every secret replaced: what lies under a secret's name, and what an address holds.

    An expression such as ${oc.env:NAME} stays, for it is no secret.
    """
    if isinstance(value, Mapping):
        return {k: _masked_item(v) if is_secret_name(str(k)) else masked(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [SHOWN if _is_flag(before) else masked(v) for before, v in zip((None, *value), value, strict=False)]
    return _ONLY_SCHEME.sub(rf"\1{SHOWN}", hide(value)) if isinstance(value, str) else value


def _is_flag(word: Any) -> bool:
    """Return whether a word of a command says that the next one is a secret."""
    return isinstance(word, str) and _IS_FLAG.fullmatch(word) is not None


def _masked_item(value: Any) -> Any:
    if isinstance(value, str):
        return value if not value or value.startswith("${") else SHOWN
    if isinstance(value, int | float) and not isinstance(value, bool):
        return SHOWN
    if isinstance(value, list | tuple):
        return [_masked_item(v) for v in value]
    if isinstance(value, Mapping):
        return {k: _masked_item(v) for k, v in value.items()}
    return value


def hide(text: str, *secrets: str | None) -> str:
    """Return a text without these secrets, and without what an address or an Authorization in it holds."""
    # The longest first: one secret may be a part of another, which would stay in pieces.
    for secret in sorted({s for s in secrets if s and len(s) >= MIN_SECRET}, key=len, reverse=True):
        text = text.replace(secret, SHOWN)
    if "://" in text:
        text = _QUERY.sub(rf"\1{SHOWN}", _USER.sub(SHOWN, text))
    # Cookies last: theirs is whatever stands between semicolons, the names that the others are told by too.
    for found in (_HEADER, _BEARER, _ASSIGNED, _YAML, _FLAG, _TOKEN, _COOKIE):
        text = found.sub(rf"\1{SHOWN}", text)
    return _ISSUED.sub(SHOWN, text)


def secrets_in_query(url: str) -> tuple[str, ...]:
    """The values of a URL's query that stand under a secret's name, as written and decoded: `?key=s3cr3t` gives s3cr3t."""
    values = [match.group(0)[len(match.group(1)) :] for match in _QUERY.finditer(url)]
    return tuple(dict.fromkeys([*values, *map(urllib.parse.unquote_plus, values)]))


def scrubbed(text: str) -> str:
    """Return a text without the secrets of this process's environment, and without what `hide` finds by itself."""
    return hide(text, *secret_variables(os.environ))


PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""The variables of the trainer's environment that a process of somebody else's code has too."""


def passed_on(*also: str) -> dict[str, str]:
    """Return the variables of `PASSED_ON` and `also`, as far as they are set."""
    return {name: os.environ[name] for name in (*PASSED_ON, *also) if name in os.environ}


def secret_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of all variables with a secret's name."""
    return tuple(value for name, value in environ.items() if is_secret_name(name))


class HideSecrets(logging.Filter):
    """Hides secrets in log records, tracebacks included; it belongs to a handler, which sees the records of all loggers."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets = tuple(secrets)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> HideSecrets:
        """Return one that hides the values of all variables with a secret's name."""
        return cls(secret_variables(environ))

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; it is always kept."""
        try:
            said = record.getMessage()
        except (TypeError, ValueError):
            return True  # logging reports it itself
        hidden = hide(said, *self._secrets)
        if hidden != said:
            record.msg, record.args = hidden, ()
        if record.exc_info and record.exc_text is None:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = hide(record.exc_text, *self._secrets)
        return True
