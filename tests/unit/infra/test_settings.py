"""Settings of plug-ins: their values, and the errors about them."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from polyturn.core.errors import ConfigError
from polyturn.infra.settings import AtLeastOne, Score, Settings, Text


class Mine(Settings):
    size: AtLeastOne = 8
    name: Text = "x"
    score: Score | None = 1.0
    names: Annotated[dict[str, int], Field(min_length=1)] | None = None


def test_null_is_none_or_the_default() -> None:
    assert Mine.read({"size": None, "score": None}, who="it") == Mine(size=8, score=None)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"size": 0}, "size", "0"),
        ({"size": True}, "size", "True"),
        ({"size": 1.5}, "size", "1.5"),
        ({"name": " "}, "name", "' '"),
        ({"name": 3}, "name", "3"),
        ({"score": float("nan")}, "score", "nan"),
        ({"score": 1e16}, "score", "1e+16"),
        ({"score": "1"}, "score", "'1'"),
        ({"names": {}}, "names", "it must be 1 or more items long"),
        ({"siz": 1}, "'siz'", "'size'"),
        ({"name": {"api_key": "sk"}}, "name", "{'api_key': '***'}"),
        ({"api_key": "sk"}, "api_key", "api_key_env"),
    ],
)
def test_wrong_setting_is_named_with_its_value(config: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="it: ") as caught:
        Mine.read(config, who="it")
    assert key in str(caught.value) and value in str(caught.value) and "'sk'" not in str(caught.value)


def test_values_under_the_name_of_a_secret_are_hidden() -> None:
    class WithSecrets(Settings):
        api_keys: list[str]
        passwords: dict[str, int]

    with pytest.raises(ConfigError, match=r"api_keys\.0: it must be a text.*passwords\.db: it must be") as raised:
        WithSecrets.read({"api_keys": [12345678], "passwords": {"db": "hunter2hunter2"}}, who="it")
    assert "12345678" not in str(raised.value) and "hunter2" not in str(raised.value)
