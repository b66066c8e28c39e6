"""AnswerCache: answers of endpoints, on disk, so that the same question is asked once.

    key = everything that is sent, the address and the seed included   ->   the answer, as JSON

One SQLite file, which any number of processes may share. The first answer that is stored stands: who asked the same at the
same time reads it too, so a second run sees what the first one saw. Calls run in a thread, never on the event loop.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
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
        self._lock = threading.Lock()
        self._threads = DaemonThreads(name="answers", max_threads=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                self._with(_make)
        except (OSError, sqlite3.Error) as problem:
            raise ConfigError(
                f"the cache {str(path)!r} cannot be used ({one_line(problem)}); name another file, or null for no cache"
            ) from problem

    @property
    def num_answers(self) -> int:
        """Number of answers that it holds."""
        with self._lock:
            return int(self._with(lambda db: db.execute("select count(*) from answers").fetchone())[0])

    async def get(self, question: Mapping[str, Any]) -> Any:
        """Return the answer to a question; None if it was never asked."""
        return await self._threads.run(self._get, key_of(question))

    async def put(self, question: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
        """Keep an answer, unless there is one already; return the one that stands."""
        return await self._threads.run(self._put, key_of(question), json.dumps(answer, ensure_ascii=False))

    def _get(self, key: str) -> Any:
        with self._lock:
            row = self._with(lambda db: db.execute("select answer from answers where key = ?", (key,)).fetchone())
        return None if row is None else json.loads(row[0])

    def _put(self, key: str, answer: str) -> Any:
        def store(db: sqlite3.Connection) -> Any:
            db.execute("insert or ignore into answers (key, answer) values (?, ?)", (key, answer))
            return db.execute("select answer from answers where key = ?", (key,)).fetchone()

        with self._lock:
            return json.loads(self._with(store)[0])

    def _with(self, work: Any) -> Any:
        """Do something in a transaction. The file is open only meanwhile, so that nothing is left to be closed."""
        db = sqlite3.connect(self.path, timeout=WAIT_S)
        try:
            with db:
                return work(db)
        finally:
            db.close()


def key_of(question: Mapping[str, Any]) -> str:
    """Return the key of a question: a digest of its JSON, whatever the order of its keys."""
    return hashlib.sha256(
        json.dumps(question, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()


def _make(db: sqlite3.Connection) -> None:
    db.execute("pragma journal_mode = wal")
    db.execute("create table if not exists answers (key text primary key, answer text not null)")
