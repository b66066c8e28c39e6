"""The image is not built here; its paths, its pins and its extras are checked."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guides" / "engines.md").read_text(encoding="utf-8")
PINS = (ROOT / "scripts" / "engines" / "build.py").read_text(encoding="utf-8")


def test_copied_paths_exist_and_reach_the_builder():
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for path in line.split()[:-1]]
    assert copied
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)
    assert set(copied) == let_through


def test_image_and_guide_install_tested_versions():
    tested = set(re.findall(r'"((?:vllm|sglang)(?:-cpu)?==[\w.]+)"', PINS))
    tested = {pin.replace("-cpu", "") for pin in tested}
    assert len(tested) == 2
    for text in (DOCKERFILE, GUIDE):
        assert set(re.findall(r"\b(?:vllm|sglang)==[\w.]+", text)) == tested


def test_extras_exist_and_the_command_is_ours():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert "polyturn" in project["scripts"]
    assert 'ENTRYPOINT ["/opt/polyturn/bin/polyturn"]' in DOCKERFILE
