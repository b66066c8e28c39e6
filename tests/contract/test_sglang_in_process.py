"""SGLang inside a process that runs polyturn, in the environment of `make engines`; no HTTP between the two."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from engine_servers import ROOT, interpreter, why_not


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
    assert said["cut"] == [True, "abort"]
