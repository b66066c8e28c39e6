"""The files that `polyturn config migrate` writes from a config in verl's keys."""

from pathlib import Path

import pytest
import yaml

from polyturn.compat.verl_config.migrate import run
from polyturn.core.errors import ConfigError
from support.refusals import refuses

OVERRIDES = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet"]


def config(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text("data: {train_batch_size: 4}\n")
    return path


@pytest.mark.parametrize("odd", ["a\nname: b", "a\u2028b", "a\rname: b"])
def test_value_of_several_lines_stays_a_value(odd: str, tmp_path: Path):
    path = config(tmp_path)
    run(path, [*OVERRIDES, f"+polyturn.model.chat_template='{odd}'"], out=None)
    native = yaml.safe_load((tmp_path / "run.polyturn.yaml").read_text())
    assert native["model"]["chat_template"] == odd and native["name"] == "gsm8k"
    assert (tmp_path / "run.polyturn.md").read_text().startswith(f"# The translation of each key of {path}")


@pytest.mark.parametrize("out", ["run.yaml", "../{}/run.yaml", "new.md", "new"])
def test_wrong_target_is_refused_before_anything_is_written(out: str, tmp_path: Path):
    path = config(tmp_path)
    before = path.read_text()
    refuses(
        lambda: run(path, OVERRIDES, out=tmp_path / out.format(tmp_path.name)),
        ConfigError,
        "--out is ",
        "name a .yaml file",
    )
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_defaults_go_and_empty_plugin_arguments_stay(tmp_path: Path):
    path = config(tmp_path)
    own = "{name: grpo, kwargs: {nothing: {}, deep: {nothing: {}}}}"
    run(path, [*OVERRIDES, f"+polyturn.rollout.scheduler_kwargs={own}"], out=None)
    native = yaml.safe_load((tmp_path / "run.polyturn.yaml").read_text())
    assert native["rollout"]["scheduler_kwargs"] == yaml.safe_load(own)
    assert {} not in native.values() and {} not in native["train"].values()
