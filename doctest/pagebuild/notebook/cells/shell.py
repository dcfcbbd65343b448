# Run this cell first. It makes cells with `%%bash` run in one shell, as if they were typed into one terminal: variables
# and the folder last from cell to cell. `%%writefile` makes the folder of its file.
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from IPython.core.magic import register_cell_magic

end_of_cell = "--- end of cell ---"
environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"TERM": "dumb", "COLUMNS": "120"}
environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
terminal = subprocess.Popen(
    ["/bin/bash", "--norc", "-eE", "-o", "pipefail"],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    encoding="utf-8",
)


@register_cell_magic
def bash(_line, cell):
    assert terminal.stdin
    assert terminal.stdout
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as script:
        script.write(cell)
        script.flush()
        terminal.stdin.write(f". {script.name} < /dev/null; echo '{end_of_cell}'\n")
        terminal.stdin.flush()
        for text in terminal.stdout:
            shown = text.removesuffix(f"{end_of_cell}\n")
            print(shown, end="")
            if shown != text:
                return
    raise RuntimeError(f"a command ended with exit code {terminal.wait()}: correct it, and run the first cell again")


@register_cell_magic
def writefile(line, cell):
    file = Path(line)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(cell, encoding="utf-8")
