"""docs/algorithms.md names every estimator, and what it shows works."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter

from polyturn.algorithms.advantages import advantages, bind_estimator, traits_of
from polyturn.config.models import AlgorithmConfig
from polyturn.config.parts import arguments_of

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Advantages")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` \|(.*)\|$", SECTION, re.M)
OWN = [
    name for name, fn in ((n, advantages.resolve(n)) for n in advantages) if fn.__module__.startswith("polyturn.algorithms")
]


def test_every_estimator_is_documented() -> None:
    assert sorted(name for name, _ in ROWS) == sorted(OWN)
    for name, rest in ROWS:
        cells = [c.strip() for c in rest.split("|")]
        assert len(cells) == 3 and all(cells), name
        assert re.search(r"20\d\d", cells[1]), name


@pytest.mark.parametrize("line", re.findall(r"^algorithm: (\{.*\})$", SECTION, re.M))
def test_documented_configuration_is_valid(line: str) -> None:
    config = TypeAdapter(AlgorithmConfig).validate_python(yaml.safe_load(line))
    bind_estimator(advantages.resolve(config.advantage.name), offered={}, kwargs=arguments_of(config.advantage))


def test_documented_estimators_work() -> None:
    made: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", SECTION, re.S)[0], made)
    assert made["above_half"](np.array([1.0]), [[]]) == [[]]
    assert traits_of(made["own_score"]).needs_turn_scores and made["own_score"]([]) == []
