"""SGLang inside a process that runs polyturn, in the environment of `make engines`; no HTTP between the two."""

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from engine_servers import ROOT, interpreter, why_not

from polyturn.testing.runs import write_tiny_run
from polyturn.tracking.jsonl import read_metrics


@pytest.mark.slow
def test_it_samples_takes_weights_in_the_middle_of_a_completion_and_aborts(tmp_path, model_folder):
    if (reason := why_not("sglang")) is not None:
        pytest.skip(reason)
    out = tmp_path / "said.json"
    subprocess.run(
        [str(interpreter("sglang")), str(Path(__file__).parent / "sglang_in_process.py"), str(model_folder), str(out)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=400,
        capture_output=True,
    )
    said = json.loads(out.read_text(encoding="utf-8"))
    assert max(said["gap"], said["gap_after"]) < 1e-4
    assert (said["across"], said["versions"], said["version_after"]) == (400, [0, 1], 1)
    assert said["compared"][0] == said["compared"][1] > 0
    assert said["cut"] == [True, "abort"]


TRAINS = """\
import site, sys
site.addsitedir(sys.argv.pop(1))  # behind its own packages: what polyturn needs and SGLang does not bring
if __name__ == "__main__":  # its processes import this file again
    from polyturn.cli.main import main
    sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_trains_with_it(tmp_path):
    if (reason := why_not("sglang")) is not None:
        pytest.skip(reason)
    (tmp_path / "trains.py").write_text(TRAINS)
    wider = ("model.init.hidden_size=64", "model.init.head_dim=32", "model.init.intermediate_size=64")
    engine = ("engine.kind=sglang", "engine.in_process=true")
    command = [str(interpreter("sglang")), "trains.py", sysconfig.get_path("purelib")]
    run = ["train", str(write_tiny_run(tmp_path)), "train.steps=2", *engine, *wider]
    called = subprocess.run(
        [*command, *run],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert called.returncode == 0, called.stderr[-3000:]
    assert "the weights arrive" in called.stderr + called.stdout
    steps = [m for m in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl") if "loss/total" in m]
    assert [m["step"] for m in steps] == [1, 2]
    assert all(m["policy/rollout_difference"] < 1e-4 for m in steps)
