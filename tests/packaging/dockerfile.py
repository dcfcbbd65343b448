"""What ``docker/Dockerfile`` does, done without Docker: its steps in a folder and a clean environment.

python tests/packaging/dockerfile.py

The steps of the stage `build` are carried out as they stand there, but for those of apt-get, with /opt and /src in a
temporary folder; then the health check of the stage `run`, on a PATH without a compiler. ``TORCH_INDEX`` in the
environment names another index for torch.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile"
KEPT = ("HOME", "LANG", "PIP_", "SSL_", "REQUESTS_", "HTTP", "http", "NO_PROXY", "no_proxy", "TORCH_INDEX")

Step = tuple[str, str]


def stages(text: str) -> dict[str, list[Step]]:
    """Return the instructions of each stage, by its name."""
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    found: dict[str, list[Step]] = {}
    steps: list[Step] = []
    for line in filter(None, lines):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            steps = found.setdefault(rest.partition(" AS ")[2], [])
        else:
            steps.append((keyword, rest.strip()))
    return found


def copied(text: str) -> list[str]:
    """Return what comes from the clone into the image."""
    copies = [rest.split() for steps in stages(text).values() for keyword, rest in steps if keyword == "COPY"]
    return [word for words in copies if not words[0].startswith("--from") for word in words[:-1]]


def carry_out(steps: list[Step], root: Path, environment: dict[str, str]) -> None:
    """Do what a stage does, below another root; ``environment`` has its variables afterwards."""
    here = root
    for keyword, rest in steps:
        placed = re.sub(r"(?<![\w.])/(opt|src)\b", rf"{root}/\1", rest)
        if keyword == "ENV":
            for word in shlex.split(placed):
                name, _, value = word.partition("=")
                environment[name] = Template(value).safe_substitute(environment)
        elif keyword == "WORKDIR":
            here = Path(placed)
            here.mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            *sources, target = placed.split()
            for source in sources:
                copy(ROOT / source, here / target if target != "./" else here / source)
        elif keyword == "RUN" and "apt-get" not in placed:
            print(f"RUN {rest}", flush=True)
            subprocess.run(["bash", "-o", "pipefail", "-c", placed], cwd=here, env=environment, check=True)


def copy(source: Path, target: Path) -> None:
    """Copy a file or a folder."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def main() -> None:
    """Build as the image is built, and look at the result as its health check does."""
    found = stages(FILE.read_text(encoding="utf-8"))
    environment = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    (index,) = [rest.partition("=")[2] for keyword, rest in found["build-cpu"] if keyword == "ENV"]
    environment = {"TORCH_INDEX": index, "PATH": os.defpath} | environment
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        carry_out(found["build"], root, environment)
        programs = root / "opt" / "colossal" / "bin"
        (health,) = [rest for keyword, rest in found["run"] if keyword == "HEALTHCHECK"]
        command = json.loads(health.partition("CMD ")[2])
        environment["PATH"] = str(programs)
        subprocess.run([programs / command[0], *command[1:]], cwd=root, env=environment, check=True)
        installed = Path(__file__).with_name("installed.py")
        subprocess.run([programs / "python", installed, "install"], cwd=root, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
