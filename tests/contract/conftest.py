"""One server of each real engine for the whole session."""

import asyncio
from pathlib import Path

import pytest
from engine_servers import READY_S, launch_spec, why_not

from polyturn.core.errors import EngineError
from polyturn.engines.launcher import Server
from support.served_model import small_model

TEST_S = 600 + READY_S
"""Seconds for a test on a real server, which may start one of its own."""


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Report which real servers were left out, and why."""
    if "not (engines" in config.getoption("markexpr", ""):  # `make test` never starts them
        return
    for engine in ("vllm", "sglang"):
        if (reason := why_not(engine)) is not None:
            terminalreporter.write_line(f"NOT TESTED on a real {engine} server: {reason}", yellow=True, bold=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the start of a server out of the time of the test that happens to come first; `READY_S` limits it."""
    for item in items:
        is_on_server = item.path.parent == Path(__file__).parent and item.get_closest_marker("engines") is not None
        if is_on_server and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def running_server(model_folder):
    """Return a function that starts an engine's server once and gives it, or skips the test with the reason."""
    loop = asyncio.new_event_loop()
    servers: dict[str, Server] = {}
    failed: dict[str, str] = {}

    def start(engine: str) -> Server:
        if (reason := why_not(engine)) is not None:
            pytest.skip(reason)
        if engine in failed:
            pytest.fail(f"the {engine} server did not start: {failed[engine]}", pytrace=False)
        if engine not in servers:
            try:
                servers[engine] = loop.run_until_complete(Server.start(launch_spec(engine, model_folder)))
            except EngineError as problem:
                failed[engine] = str(problem)
                raise
        return servers[engine]

    yield start
    for server in servers.values():
        loop.run_until_complete(server.stop())
    loop.close()


@pytest.fixture(scope="session")
def server_of(running_server):
    """Return a function that gives the URL of an engine's server."""
    return lambda engine: running_server(engine).url
