"""AnswerCache: endpoints' answers on disk, so that the same request is sent once.

    key = everything that is sent, the address and the seed included   ->   the answer, as JSON

One SQLite file, which any number of processes may share. The first stored answer counts: a process that sent the same
request meanwhile uses it too, so a second run sees the answers of the first. Calls run in a thread.
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
"""Seconds that a writer waits for another one."""


class AnswerCache:
    """A file of answers."""

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConfigError: it cannot be made, or is something else.
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
        """Return the answer to a request; None if it was never sent."""
        row = await self._threads.run(self._do, "select answer from answers where key = ?", _key_of(request))
        return None if row is None else json.loads(row[0])

    async def put(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
        """Store an answer unless there is one already; return the stored one."""
        text = json.dumps(answer, ensure_ascii=False)
        await self._threads.run(
            self._do, "insert or ignore into answers (key, answer) values (?, ?)", _key_of(request), text
        )
        return await self.get(request)

    def _do(self, statement: str, *values: str) -> Any:
        """Run one statement and return its first row. The file is open only meanwhile, so nothing is left to close."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=WAIT_S)) as db, db:
            return db.execute(statement, values).fetchone()


def _key_of(request: Mapping[str, Any]) -> str:
    """Return a digest of the request's JSON, which does not depend on the order of its keys."""
    return hashlib.sha256(
        json.dumps(request, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()
