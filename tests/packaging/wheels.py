"""Build sdist and wheel of the commit at hand, install each into clean environments, and train with what is there.

python tests/packaging/wheels.py [--nightly]

With a compiler and without one. What passed lies in ``dist``.
"""

import argparse
import filecmp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r'(?<=^__version__ = ")[^"]+(?=")', re.MULTILINE)
CASES = [  # what is installed, whether there is a compiler, how, and when the own code is built then
    ("*.whl", True, {}, "first use"),
    ("*.whl", False, {}, "none"),
    ("*.tar.gz", True, {"CUDA_EXT": "1"}, "install"),
    ("*.tar.gz", False, {}, "none"),
]


def nightly(version: str, day: datetime) -> str:
    """Return the version of a day between two releases.

    Args:
        version: The one of the sources, such as ``0.2.0.dev0``.
        day: When the sources were as they are.

    Raises:
        ValueError: The sources are those of a release, which no day comes before.
    """
    release, separator, _ = version.partition(".dev")
    if not separator:
        raise ValueError(
            f"A nightly version leads to a release, as 0.2.0.dev0 does. Found {version}: set the next one."
        )
    return f"{release}.dev{day:%Y%m%d}"


def export(target: Path, *, is_nightly: bool) -> None:
    """Put the files of the commit into a folder, with the day of the commit in their version if that is wanted."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", target], input=archive, check=True)
    if is_nightly:
        command = ["git", "show", "--no-patch", "--format=%ct", "HEAD"]
        seconds = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        file = target / "src" / "colossal" / "__init__.py"
        text = file.read_text(encoding="utf-8")
        day = datetime.fromtimestamp(int(seconds), UTC)
        file.write_text(VERSION.sub(lambda found: nightly(found.group(), day), text), encoding="utf-8")


def build(source: Path, target: Path) -> list[Path]:
    """Build the sdist, and the wheel from it; twice, as whoever builds them must get the same."""
    for folder in (target, target / "again"):
        command = [sys.executable, "-m", "build", "--outdir", str(folder), str(source)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    files = sorted(path for path in target.iterdir() if path.is_file())
    for file in files:
        assert filecmp.cmp(file, target / "again" / file.name, shallow=False), f"{file.name} cannot be reproduced"
    return files


def try_out(file: Path, folder: Path, *, with_compiler: bool, variables: dict[str, str], extensions: str) -> None:
    """Install a file into an environment of its own, and train there."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    programs = folder / "venv" / "bin"
    path = [str(programs), *([os.environ["PATH"]] if with_compiler else [])]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX", "NVCC")}
    environment |= {"PATH": os.pathsep.join(path), "XDG_CACHE_HOME": str(folder / "cache"), **variables}
    if not with_compiler:
        environment["CC"] = "/bin/false"
    install = [programs / "python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{file}[cli]"]
    subprocess.run(install, cwd=folder, env=environment, check=True)
    program = [programs / "python", Path(__file__).with_name("installed.py"), extensions]
    subprocess.run(program, cwd=folder, env=environment, check=True)
    print(f"{file.name}, {'a' if with_compiler else 'no'} compiler {variables or ''}: ", end="")
    print(f"ok, {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """Build, try out, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nightly", action="store_true", help="the version has the day of the commit")
    is_nightly = parser.parse_args().nightly
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("source", "built"):
            (folder / part).mkdir()
        export(folder / "source", is_nightly=is_nightly)
        files = build(folder / "source", folder / "built")
        for number, (pattern, with_compiler, variables, extensions) in enumerate(CASES):
            (file,) = [file for file in files if file.match(pattern)]
            place = folder / str(number)
            place.mkdir()
            try_out(file, place, with_compiler=with_compiler, variables=variables, extensions=extensions)
            shutil.rmtree(place)
        (ROOT / "dist").mkdir(exist_ok=True)
        for file in files:
            shutil.copy(file, ROOT / "dist")
            print(f"dist/{file.name}")


if __name__ == "__main__":
    sys.exit(main())
