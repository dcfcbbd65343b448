# Run this cell first. It makes this notebook a world of one process, as `torchrun --nproc_per_node=1` would, and shows
# the figures that a cell saves.
import os
import socket
import sys
from pathlib import Path

from IPython import get_ipython
from IPython.display import SVG, Image, display

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
sys.argv[:] = ["page.py"]
figures = {path: path.stat().st_mtime_ns for path in Path().glob("*.*")}


def show_figures(_result):
    for path in sorted(Path().glob("*.*")):
        if path.suffix in {".svg", ".png"} and figures.get(path) != path.stat().st_mtime_ns:
            figures[path] = path.stat().st_mtime_ns
            display(SVG(path.name) if path.suffix == ".svg" else Image(path.name))


get_ipython().events.register("post_run_cell", show_figures)
