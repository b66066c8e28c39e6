"""Runs one SQL query over one table, in a process that ends with it; table and result are streams of Arrow's.

    <stdin> {"query": "select id from trajectories where reward < 1", "max_bytes": 1073741824} newline, stream of the table
    <stdout> stream of the result          or exit code 3 and one line on <stderr> that says what is wrong with the query

Separate, and without anything of the library, because it is run as a file by `sql.py`: DuckDB cannot be interrupted inside
one call of a function (`repeat('x', 2000000000)`), and its bound on memory does not count what such a call takes.
"""

from __future__ import annotations

import json
import re
import resource
import sys

import duckdb
import pyarrow as pa

WRONG = 3
"""The exit code of a query that cannot be run."""


def main() -> int:
    """Run the query; return the exit code."""
    query = json.loads(sys.stdin.buffer.readline())
    with pa.ipc.open_stream(sys.stdin.buffer) as stream:
        table = stream.read_all()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (resident + query["max_bytes"], resident + query["max_bytes"]))
    settings = {"enable_external_access": "false", "threads": "2", "temp_directory": "", "lock_configuration": "true"}
    try:
        with duckdb.connect(config={**settings, "memory_limit": f"{query['max_bytes'] // 2}B"}) as connection:
            connection.register("trajectories", table)
            result = connection.sql(query["query"])
            result_table = (pa.table({}) if result is None else result.to_arrow_table()).combine_chunks()
    except (duckdb.Error, MemoryError) as problem:
        # Whatever part of DuckDB finds no memory says so in its own way.
        if isinstance(problem, MemoryError) or re.search("out of memory|bad.?alloc", str(problem), re.IGNORECASE):
            return _wrong(f"it takes more than {query['max_bytes'] >> 20} MiB of memory ({_line(problem)})")
        return _wrong(_line(problem))
    with pa.ipc.new_stream(sys.stdout.buffer, result_table.schema) as writer:
        writer.write_table(result_table)
    return 0


def _line(problem: BaseException) -> str:
    return re.sub(r"\s+", " ", str(problem)).strip() or type(problem).__name__


def _wrong(why: str) -> int:
    sys.stderr.write(why + "\n")
    return WRONG


if __name__ == "__main__":
    sys.exit(main())
