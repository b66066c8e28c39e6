"""The base folder of relative paths in a translated configuration."""

from pathlib import Path

import pytest

from polyturn.config.translate.paths import absolute, moved
from polyturn.config.translate.translation import Translation
from polyturn.core.errors import ConfigError

LONG = "x" * 5000 + ".yaml"
"""The name of a file that cannot be."""


def tools(name: str) -> Translation:
    native = {"rollout": {"tools": {"file": name}}}
    paths = (("rollout", "tools", "file"),)
    return Translation(native=native, origin={}, paths=paths, native_paths=(), fates=())


def test_path_is_looked_up_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: []")
    native = absolute(tools("tools.yaml"), folder=tmp_path)
    assert native == {"rollout": {"tools": {"file": str((tmp_path / "tools.yaml").resolve())}}}


@pytest.mark.parametrize("name", ["missing.yaml", "~/missing.yaml", LONG])
def test_missing_path_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.tools\.file is '.*no such file in .* or {tmp_path}; check the path$"):
        absolute(tools(name), folder=tmp_path)


def test_impossible_file_name_is_not_moved(tmp_path: Path) -> None:
    assert moved([LONG], start=tmp_path, end=tmp_path / "runs") == [LONG]


def test_working_folder_is_named_once_if_the_config_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"no such file in {tmp_path}; check the path$"):
        absolute(tools("missing.yaml"), folder=Path())
