"""The Dockerfile without Docker; ``dockerfile.py`` carries its steps out, before a release."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("dockerfile", Path(__file__).with_name("dockerfile.py"))
assert _SPEC
assert _SPEC.loader
dockerfile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(dockerfile)
TEXT = dockerfile.FILE.read_text(encoding="utf-8")


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("hadolint")
    return subprocess.run([program, "--no-color", path], capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say() -> None:
    done = lint(dockerfile.FILE)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ("USER 10001", "USER root", "DL3002"),
        ("FROM ubuntu:${UBUNTU} AS run-cpu", "FROM ubuntu AS run-cpu", "DL3006"),
        ('CMD ["bash"]', "CMD bash", "DL3025"),
    ],
)
def test_hadolint_finds_what_is_planted(before, after, rule, tmp_path) -> None:
    assert before in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(before, after), encoding="utf-8")
    done = lint(tmp_path / "Dockerfile")
    assert done.returncode == 1
    assert rule in done.stdout


def test_the_image_is_the_last_stage_of_each_device() -> None:
    found = dockerfile.stages(TEXT)
    assert {f"{use}-{device}" for use in ("build", "run") for device in ("cpu", "cuda")} <= set(found)
    assert list(found)[-1] == "run"
    steps = dict(found["run"])
    assert steps["COPY"] == "--from=build /opt/colossal /opt/colossal"
    assert steps["USER"] == "10001"
    assert steps["HEALTHCHECK"].endswith('CMD ["colossal", "check"]')


def test_what_is_copied_exists_and_is_sent_to_the_daemon() -> None:
    sent = dockerfile.FILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert sent[1] == "*"
    names = dockerfile.copied(TEXT)
    assert {f"!{name}" for name in names} == {line for line in sent if line.startswith("!")}
    assert all((ROOT / name).exists() for name in names)


def test_steps_are_carried_out_below_another_root(tmp_path) -> None:
    text = """FROM one AS build
# a comment
ENV WHO=me PATH=/opt/x:$PATH
RUN apt-get update \\
    && exit 1
WORKDIR /src
COPY LICENSE constraints.txt ./
RUN echo "$WHO" > /opt/who \\
    && echo "$PATH" >> /opt/who
"""
    (tmp_path / "opt").mkdir()
    environment = {"PATH": "/usr/bin:/bin"}
    dockerfile.carry_out(dockerfile.stages(text)["build"], tmp_path, environment)
    assert (tmp_path / "opt" / "who").read_text().splitlines() == ["me", f"{tmp_path}/opt/x:/usr/bin:/bin"]
    assert {path.name for path in (tmp_path / "src").iterdir()} == {"LICENSE", "constraints.txt"}
    with pytest.raises(subprocess.CalledProcessError):
        dockerfile.carry_out([("RUN", "exit 3")], tmp_path, environment)
