# Run this cell first. `%%page 41` notes a cell down as the part of the program that stands at line 41 of the page;
# `run` puts the parts together, writes the program beside this notebook, runs it, and shows what it prints and draws.
import os
import shlex
import subprocess
import sys
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
    file = Path(next(word for word in words if word.endswith(".py")))
    file.write_text(program, encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in Path().glob("*.*")}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONUNBUFFERED": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    with subprocess.Popen(words, env=environment, **output) as process:
        for line in process.stdout or ():
            print(line, end="")
    if process.returncode:
        raise RuntimeError(f"the program ended with exit code {process.returncode}")
    for path in sorted(Path().glob("*.*")):
        if path.suffix in {".svg", ".png"} and before.get(path) != path.stat().st_mtime_ns:
            display(SVG(path.name) if path.suffix == ".svg" else Image(path.name))
