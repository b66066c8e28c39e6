"""AnswerCache: keeps endpoints' answers on disk, so that each request is sent only once.

    key = the whole request, including address and seed   ->   the answer, as JSON

The cache is one SQLite file, which several processes may share. The first stored answer of a request counts, even for a
process that sent the same request at the same time, so a second run gets the answers of the first. Calls run in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyturn.core.errors import ConfigError, one_line
from polyturn.infra.threads import DaemonThreads

WAIT_S = 30.0
"""Seconds that a writer waits for another writer."""


class AnswerCache:
    """A SQLite file of answers."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            ConfigError: the file cannot be created, or is not a cache.
        """
        self.path = path
        self._threads = DaemonThreads(name="answers", max_threads=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._do("pragma journal_mode = wal")
            self._do("create table if not exists answers (key text primary key, answer text not null)")
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(
                f"the cache {str(path)!r} cannot be used ({one_line(problem)}); name another file, or null for no cache"
            ) from problem

    @property
    def num_answers(self) -> int:
        """Number of stored answers."""
        return int(self._do("select count(*) from answers")[0])

    async def get(self, request: Mapping[str, Any]) -> Any:
        """Return the stored answer to a request, or None."""
        row = await self._threads.run(self._do, "select answer from answers where key = ?", _key_of(request))
        return None if row is None else json.loads(row[0])

    async def put(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
        """Store an answer unless the request has one; return the stored answer."""
        text = json.dumps(answer)  # ASCII, because SQLite cannot store half of a surrogate pair
        await self._threads.run(
            self._do, "insert or ignore into answers (key, answer) values (?, ?)", _key_of(request), text
        )
        return await self.get(request)

    def _do(self, statement: str, *values: str) -> Any:
        """Open the file, run one statement, and return its first row."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S)) as db, db:
            return db.execute(statement, values).fetchone()


def _key_of(request: Mapping[str, Any]) -> str:
    """Return a digest of the request's JSON that does not depend on the order of keys."""
    return hashlib.sha256(
        json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()
