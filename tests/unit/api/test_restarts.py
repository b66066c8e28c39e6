"""A run that lost a rank restarts as itself: in its own folder, or from the beginning if it had none yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn import build
from polyturn.api.training import RunOptions, run_training
from polyturn.config.load import load_config
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError, RankLostError
from polyturn.environments.base import Adapter
from support.refusals import refuses


def test_restart_before_a_folder_is_chosen_keeps_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names: list[str] = []

    def check_plugins(source: build.ConfigSource) -> None:
        names.append(source.config.name)
        raise RankLostError("the node of rank 1 is gone") if len(names) < 3 else ConfigError("the third attempt")

    monkeypatch.setattr(build, "check_plugins", check_plugins)
    loaded = load_config(RunConfig, None, ["model.path=none", "name=mine", f"out={tmp_path}", "cluster.restarts=2"])
    source = build.ConfigSource(config=loaded.config, base=tmp_path)
    refuses(lambda: run_training(source, loaded.resolved, RunOptions(again=str)), ConfigError, "third attempt")
    assert names == ["mine"] * 3


def test_restart_closes_the_adapters_and_makes_new_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed: list[int] = []

    class Closing(Adapter):
        def close(self) -> None:
            closed.append(int(self.id))
            raise OSError("the server is gone")

    opened: list[Closing] = []

    def check_plugins(source: build.ConfigSource) -> None:
        assert not source.adapters, "an adapter may use objects of the event loop that has ended"
        opened.append(Closing("own", str(len(opened)), {}))
        source.adapters["own"] = opened[-1]
        raise RankLostError("the node of rank 1 is gone") if len(opened) < 3 else ConfigError("the third attempt")

    monkeypatch.setattr(build, "check_plugins", check_plugins)
    loaded = load_config(RunConfig, None, ["model.path=none", f"out={tmp_path}", "cluster.restarts=2"])
    with pytest.raises(ConfigError, match="third attempt"):
        run_training(build.ConfigSource(config=loaded.config, base=tmp_path), loaded.resolved, RunOptions(again=str))
    assert closed == [0, 1]
