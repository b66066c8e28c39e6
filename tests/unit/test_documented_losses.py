"""docs/algorithms.md names every loss, average, estimator of the KL and rejection that a configuration can choose."""

import inspect
import re
from pathlib import Path

import pytest

from polyturn.algorithms.aggregate import MODES
from polyturn.algorithms.kl import kl_estimators
from polyturn.algorithms.losses import policy_losses
from polyturn.algorithms.options import REJECTIONS

PAGE = Path(__file__).parents[2] / "docs/algorithms.md"
OWN = [n for n in policy_losses if policy_losses.resolve(n).__module__.startswith("polyturn.algorithms")]


def test_what_can_be_chosen_is_in_a_table():
    firsts = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert [n for n in (*OWN, *MODES, *kl_estimators, *REJECTIONS) if not any(f"`{n}`" in first for first in firsts)] == []


def test_each_loss_has_a_source_in_its_docstring():
    without = [n for n in OWN if not re.search(r"Source: .+\d{4}", policy_losses.resolve(n).__doc__ or "")]
    assert without == ["none"]


@pytest.mark.parametrize("name", OWN)
def test_the_page_says_which_bounds_a_loss_has_by_itself(name):
    section = PAGE.read_text(encoding="utf-8").partition("## Policy losses")[2]
    row = next(line for line in section.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1])
    said = [float(n) for n in re.findall(r"[\d.e-]+", row.split("|")[-2])]
    parameters = inspect.signature(policy_losses.resolve(name)).parameters
    assert said == [parameters[n].default for n in ("clip_low", "clip_high") if n in parameters]
