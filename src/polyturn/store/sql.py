"""SQL over the table of a run's trajectories, with bounds that hold: a process of its own for each query.

    run_query(table, "select id from trajectories where reward < 1", stop=left)     an Arrow table

A condition comes from a person who looks at a run. It may take `TIMEOUT_S` and `MAX_BYTES`, reads no file, and ends when its
caller stops waiting.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa

from polyturn.core.errors import ConfigError, DataError

TIMEOUT_S = 30.0
MAX_BYTES = 1 << 30
"""The memory of a query beside the table."""
_POLL_S = 0.1
_WORKER = Path(__file__).with_name("sql_worker.py")


def run_query(
    table: pa.Table,
    query: str,
    *,
    stop: threading.Event | None = None,
    timeout_s: float = TIMEOUT_S,
    max_bytes: int = MAX_BYTES,
) -> pa.Table:
    """Run a query over the table `trajectories` and return its result.

    Args:
        table: Under that name.
        query: SQL, DuckDB's.
        stop: Set when the caller stops waiting for the answer.
        timeout_s: How long it may take.
        max_bytes: Memory that it may take beside the table.

    Raises:
        DataError: it is not valid, took too long or too much, or was stopped.
        ConfigError: DuckDB is not installed.
    """
    if importlib.util.find_spec("duckdb") is None:
        raise ConfigError("conditions need DuckDB; pip install 'polyturn[view]', or filter table() yourself")
    head = json.dumps({"query": query, "max_bytes": max_bytes}).encode() + b"\n"
    sent = io.BytesIO(head)
    sent.seek(0, os.SEEK_END)
    with pa.ipc.new_stream(sent, table.schema) as writer:
        writer.write_table(table)
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": "/nonexistent",
        "PYTHONPATH": os.pathsep.join(sys.path),
        # Otherwise allocators reserve addresses for each thread, by chance, and the bound is on addresses.
        "MALLOC_ARENA_MAX": "1",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    with subprocess.Popen(
        [sys.executable, "-P", str(_WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as child:
        if stop is not None:
            threading.Thread(target=_kill_when, args=(stop, child), name="polyturn-query", daemon=True).start()
        try:
            out, errors = child.communicate(sent.getvalue(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DataError(f"the condition or query took longer than {timeout_s:g} s; ask for less") from None
        finally:
            child.kill()
    if stop is not None and stop.is_set():
        raise DataError("the query was stopped: its caller is gone")
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"its process ended with {child.returncode}"]
        own = [name for name in table.column_names if not name.startswith("__")]
        raise DataError(f"the condition or query is not valid: {lines[-1]}. Columns: {', '.join(own)}")
    with pa.ipc.open_stream(out) as stream:
        return stream.read_all()


def _kill_when(stop: threading.Event, child: subprocess.Popen[bytes]) -> None:
    while child.poll() is None:
        if stop.wait(_POLL_S):
            child.kill()
            return
