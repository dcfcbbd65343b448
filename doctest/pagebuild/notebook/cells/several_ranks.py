# Run this cell first. `%%page 41` notes a cell down as the part of the program that stands at line 41 of the page;
# `run` puts the parts together, writes the program next to this notebook, runs it, and shows what it prints and draws.
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from IPython.core.magic import register_cell_magic
from IPython.display import SVG, Image, display

parts = {}


@register_cell_magic
def page(line, cell):
    parts[int(line)] = cell


def run(command):
    program = ""
    for line, part in sorted(parts.items()):
        program += "\n" * (line - 1 - program.count("\n")) + part
    words = shlex.split(command)
    file = next(word for word in words if word.endswith(".py"))
    Path(file).write_text(program, encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in Path().glob("*.*")}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    with (
        tempfile.TemporaryDirectory() as logs
    ):  # a file per rank: in one file, ranks would interrupt each other's lines
        place = words.index(file)
        words[place:place] = ["--redirects", "3", "--log-dir", logs]
        done = subprocess.run(words, env=environment, capture_output=True, encoding="utf-8", check=False)
        for rank in sorted(Path(logs).glob("*/*/*"), key=lambda folder: int(folder.name)):
            text = "".join((rank / name).read_text(encoding="utf-8") for name in ("stdout.log", "stderr.log"))
            print(f"--- rank {rank.name} ---\n{text}" if text and int(rank.name) else text, end="")
    for path in sorted(Path().glob("*.*")):
        if path.suffix in {".svg", ".png"} and before.get(path) != path.stat().st_mtime_ns:
            display(SVG(path.name) if path.suffix == ".svg" else Image(path.name))
    if done.returncode:
        raise RuntimeError(f"the program ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
