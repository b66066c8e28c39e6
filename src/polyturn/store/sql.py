"""Runs SQL over the table of a run's trajectories.

    run_query(table, "select id from trajectories where reward < 1", stop=left)     an Arrow table

A query is limited to `TIMEOUT_S` and `MAX_BYTES`, cannot read files or Python variables, and ends when its caller stops
waiting. DuckDB checks for an interrupt only between batches of rows, not inside a function call on one row.
"""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from polyturn.core.errors import ConfigError, DataError, one_line

TIMEOUT_S = 30.0
MAX_BYTES = 1 << 30
"""Bytes of memory that DuckDB may use in addition to the table."""
_POLL_S = 0.05
_SETTINGS = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "threads": "2",
    "lock_configuration": "true",
}


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
        table: The table that the query calls `trajectories`.
        query: A query in DuckDB's SQL.
        stop: An event; when the caller sets it, the query ends.
        timeout_s: Seconds that the query may take.
        max_bytes: Bytes of memory that the query may use in addition to the table.

    Raises:
        DataError: the query is invalid, exceeds a limit, or was stopped.
        ConfigError: DuckDB is not installed.
    """
    try:
        import duckdb
    except ModuleNotFoundError:
        raise ConfigError("conditions need DuckDB: pip install 'polyturn[view]'") from None
    done, until = threading.Event(), time.monotonic() + timeout_s
    with duckdb.connect(config={**_SETTINGS, "memory_limit": f"{max_bytes}B"}) as connection:
        connection.register("trajectories", table)

        def watch() -> None:
            while not done.wait(_POLL_S):
                if time.monotonic() > until or (stop is not None and stop.is_set()):
                    connection.interrupt()

        watcher = threading.Thread(target=watch, name="polyturn-query", daemon=True)
        watcher.start()
        try:
            result = connection.sql(query)
            return pa.table({}) if result is None else result.to_arrow_table().combine_chunks()
        except duckdb.InterruptException:
            if stop is not None and stop.is_set():
                raise DataError("the query was stopped by its caller") from None
            raise DataError(
                f"the condition or query took longer than {timeout_s:g} s; simplify it, or select fewer rows"
            ) from None
        except (duckdb.Error, MemoryError) as problem:
            columns = ", ".join(name for name in table.column_names if not name.startswith("__"))
            why = f"it needs more than {max_bytes >> 20} MiB of memory: " if _is_memory(problem) else ""
            raise DataError(
                f"the condition or query is not valid: {why}{one_line(problem)}. Columns: {columns}"
            ) from problem
        finally:
            done.set()
            watcher.join()


def _is_memory(problem: BaseException) -> bool:
    return isinstance(problem, MemoryError) or "out of memory" in str(problem).lower()
