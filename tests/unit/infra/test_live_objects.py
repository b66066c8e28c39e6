"""A live object stands in a configuration where a file has an import path, and is written as the name it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyturn.config.load import load_config, write_resolved
from polyturn.config.models import RunConfig
from polyturn.core.errors import ConfigError
from polyturn.infra.live import LiveObject
from polyturn.infra.plugins import Registry, import_attr


def price(item: str) -> str:
    return item


def values() -> dict[str, object]:
    return {
        "model": {"path": "any"},
        "rollout": {"tools": {"functions": [LiveObject(price)]}, "scheduler_kwargs": {"judge": LiveObject(price)}},
        "reward": {"function": LiveObject(price)},
        "evaluation": {"data": {"generator": "${data.train.generator}"}},
        "data": {"train": {"generator": LiveObject(price, name="mine:rows")}},
    }


def test_live_object_is_its_own_import() -> None:
    held = LiveObject(price)
    assert import_attr(held) is price
    assert Registry("rewards").resolve(held) is price
    assert repr(held) == repr(f"{__name__}:price")


def test_configuration_keeps_live_objects() -> None:
    config = load_config(RunConfig, None, values=values()).config
    (tool,) = config.rollout.tools.functions
    assert config.reward.function is not None
    assert config.evaluation.data is not None
    for key in (
        tool,
        config.rollout.scheduler_kwargs["judge"],
        config.reward.function.name,
        config.evaluation.data.generator,
    ):
        assert import_attr(key) is price


def test_file_with_the_text_of_an_object_is_refused(tmp_path: Path) -> None:
    resolved = load_config(RunConfig, None, values=values()).resolved
    assert resolved["data"]["train"]["generator"] == "<live mine:rows>"
    write_resolved(resolved, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"data\.train\.generator is '<live mine:rows>'.*resume=True"):
        load_config(RunConfig, tmp_path / "config.yaml")
    loaded = load_config(RunConfig, tmp_path / "config.yaml", values=values())
    assert import_attr(loaded.config.data.train.generator) is price


def test_wrong_value_of_a_key_for_objects_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.scheduler is 5\.5"):
        load_config(RunConfig, None, values={"model": {"path": "any"}, "rollout": {"scheduler": 5.5}})


def test_section_that_may_be_a_live_object_is_written_as_a_section() -> None:
    own = {"path": "any", "tokenizer": {"corpus": "file.py:texts", "vocab_size": 300}}
    reward = {"function": LiveObject(price)}
    config = load_config(RunConfig, None, values={"model": own, "env": {"name": "file.py:Env"}, "reward": reward}).config
    written = config.model_dump(mode="json")
    assert written["model"]["tokenizer"]["corpus"] == "file.py:texts"
    assert written["env"]["name"] == "file.py:Env"
    assert written["reward"]["function"]["name"] == f"<live {__name__}:price>"
