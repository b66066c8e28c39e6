"""A live object has a label of its own for as long as it is held, and takes it along to another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyturn.core.errors import ConfigError
from polyturn.core.live import hold, is_held, is_label, target
from polyturn.core.plugins import import_attr


def made() -> object:
    def price(item: str) -> str:
        return item

    return price


def test_label_stands_for_its_object_while_it_is_held() -> None:
    one, other = made(), made()
    first, second = hold(one), hold(other)
    assert first.label == f"<live {__name__}:made.price>"
    assert second.label == f"<live {__name__}:made.price #2>"
    assert hold(one) is first
    assert is_label(first.label)
    assert import_attr(second.label) is other
    label = second.label
    del second
    assert not is_held(label)
    with pytest.raises(ConfigError, match="resume=True"):
        target(label)


def test_object_arrives_in_another_process(tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("cloudpickle")  # comes with Ray, which is optional
    held = hold(lambda x: 2 * x, name="main:double")
    file = tmp_path / "held"
    file.write_bytes(cloudpickle.dumps(held))
    code = (
        f"import pickle, pathlib; held = pickle.loads(pathlib.Path({str(file)!r}).read_bytes())\n"
        f"from polyturn.core.plugins import import_attr; print(import_attr({held.label!r})(21))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "42\n"
