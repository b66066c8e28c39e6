"""Names of models: a wrong folder is refused before anything is loaded, and the nearest one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.config.config_source import check_model_name, folder_or_name, model_folder
from polyturn.core.errors import CheckpointError, ConfigError
from support.refusals import refuses


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "small" / "config.json").write_text("{}")
    return tmp_path


def test_missing_folder_comes_with_the_nearest_one(base: Path) -> None:
    refuses(lambda: check_model_name("./models/smal", base), ConfigError, "models/smal'", "Did you mean 'small'")


def test_folder_without_a_model_names_the_one_inside(base: Path) -> None:
    for check in (check_model_name, folder_or_name):
        with pytest.raises(ConfigError, match=r"models' has no config.json.*models/small'"):
            check("models", base)
    refuses(lambda: model_folder(base / "models"), CheckpointError, "models; did you mean ", "models/small'")


def test_folder_named_model_is_not_taken_for_its_parent(base: Path) -> None:
    (base / "models" / "small").rename(base / "models" / "model")
    refuses(lambda: model_folder(base / "models"), CheckpointError, "models/model")
    (base / "models" / "state.pt").touch()
    assert model_folder(base / "models") == base / "models" / "model"


@pytest.mark.parametrize("name", ["~nobody-here/small", "./" + "x" * 300])
def test_path_that_cannot_exist_is_refused(base: Path, name: str) -> None:
    for check in (check_model_name, folder_or_name):
        refuses(lambda check=check: check(name, base), ConfigError, "there is no folder", name)


@pytest.mark.parametrize("name", ["models/small", "smollm2", "owner/name", "gpt2"])
def test_folder_and_names_of_the_index_and_the_hub_pass(base: Path, name: str) -> None:
    check_model_name(name, base)
