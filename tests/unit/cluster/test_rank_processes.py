"""Ranks in processes of their own: commands, errors, log lines, and the end of one of them."""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyturn.algorithms.losses import policy_losses
from polyturn.cluster.rank_processes import RankProcesses
from polyturn.config.config_source import ConfigSource
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, RankLostError
from polyturn.training.rank_group import RankReply
from support.refusals import refuses

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Rank:
    """Stands for a `RankWorker`, without a model."""

    def run(self, command: str, share: tuple[Any, ...]) -> RankReply:
        logging.getLogger("polyturn.rank").warning("ran %s", command)
        match command:
            case "double":
                return RankReply(value=(os.environ["RANK"], 2 * share[0]))
            case "refuse":
                return RankReply(error=ConfigError("it cannot"))
            case "break":
                raise ZeroDivisionError
            case _:
                threading.Event().wait()
                raise AssertionError


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    group = RankProcesses(Rank, 2, row_width=1)
    yield group
    group.close()


def test_each_rank_gets_its_share(ranks: RankProcesses, caplog: pytest.LogCaptureFixture) -> None:
    answers = ranks.call("double", [(np.arange(2_000),), (np.arange(3),)])
    assert [rank for rank, _ in answers] == ["0", "1"]
    assert answers[0][1][-1] == 2 * 1_999 and answers[1][1].tolist() == [0, 2, 4]
    assert {"ran double", "rank 1: ran double"} <= set(caplog.messages), "warnings of ranks are seen where people look"


def test_share_of_two_ranks_leaves_no_descriptor(ranks: RankProcesses) -> None:
    share = (np.arange(2_000),)
    ranks.call("double", [share, share])
    before = len(os.listdir("/proc/self/fd"))
    ranks.call("double", [share, share])
    assert len(os.listdir("/proc/self/fd")) == before


def test_error_of_a_rank_is_raised_and_the_group_goes_on(ranks: RankProcesses) -> None:
    refuses(lambda: ranks.call("refuse", [(), ()]), ConfigError, "it cannot")
    assert len(ranks.call("double", [(1,), (2,)])) == 2 and ranks.lost() is None


def test_rank_that_is_killed_in_a_command_is_named(ranks: RankProcesses) -> None:
    ranks.call("double", [(1,), (2,)])
    threading.Timer(0.2, os.kill, (ranks.pids[1], signal.SIGKILL)).start()
    refuses(lambda: ranks.call("wait", [(), ()]), RankLostError, "rank 1 was killed by SIGKILL")
    refuses(lambda: ranks.call("double", [(1,), (2,)]), RankLostError, "rank 1 was killed by SIGKILL")


def test_rank_that_ends_between_commands_is_noticed(ranks: RankProcesses) -> None:
    ranks.call("double", [(1,), (2,)])
    os.kill(ranks.pids[0], signal.SIGKILL)
    refuses(lambda: ranks.call("wait", [(), ()]), RankLostError, "rank 0 was killed by SIGKILL")
    assert "rank 0 was killed" in str(ranks.lost())


def test_crash_report_has_the_last_lines_of_the_log(ranks: RankProcesses) -> None:
    with pytest.raises(RankLostError, match=r"(?s)rank . ended with code 1.*ZeroDivisionError") as lost:
        ranks.call("break", [(), ()])
    ranks.close()
    (log,) = re.findall(r"its log, (.*):$", str(lost.value), re.MULTILINE)
    assert "ran break" in Path(log).read_text(), "the whole log stays"
    shutil.rmtree(Path(log).parent)


def test_error_while_a_rank_is_built_is_raised_by_the_first_command() -> None:
    group = RankProcesses(functools.partial(_refuse, "no such model"), 2, row_width=1)
    try:
        refuses(lambda: group.call("double", [(1,), (2,)]), ConfigError, "no such model")
    finally:
        group.close()


def test_function_that_cannot_be_pickled_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad: Any = functools.partial(_refuse, threading.Lock())
    refuses(lambda: RankProcesses(bad, 1, row_width=1), TypeError, "pickle")
    assert list(tmp_path.iterdir()) == []


def _refuse(message: str) -> Any:
    raise ConfigError(message)


def test_closed_group_leaves_no_process() -> None:
    group = RankProcesses(Rank, 2, row_width=1)
    group.call("double", [(1,), (2,)])
    group.close()
    group.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in group.pids)
    assert not group.logs.exists()


class Registered(Rank):
    """Answers with a loss that it looks up by its name."""

    def __init__(self, source: ConfigSource) -> None:
        self._name = source.config.algorithm.loss.name

    def run(self, command: str, share: tuple[Any, ...]) -> RankReply:
        return RankReply(value=policy_losses.resolve(self._name).__name__)


def test_ranks_know_what_the_program_registered(tmp_path: Path) -> None:
    def mine(*arguments: Any) -> Any:
        raise AssertionError

    policy_losses.register("registered_in_a_test", replace=True)(mine)
    values = {"model": {"path": "x"}, "algorithm": {"loss": "registered_in_a_test"}}
    source = ConfigSource(config=load_config(RunConfig, None, values=values).config, base=tmp_path)
    group = RankProcesses(functools.partial(Registered, source), 1, row_width=1)
    try:
        assert group.call("name", [()]) == ["mine"]
    finally:
        group.close()
