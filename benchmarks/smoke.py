"""Every benchmark at a size that takes seconds: that it runs, and that what it compares agrees; the times say nothing.

python benchmarks/smoke.py
python benchmarks/smoke.py pipeline zero
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LIBRARIES = {"pairs", "smoke", "worlds"}


class Smoke(NamedTuple):
    """How a benchmark is run at its smallest: by torchrun on some ranks, or on none as it is."""

    options: str = ""
    ranks: int = 0


SMOKE = {
    "adam_step": Smoke("--width 256 --rounds 2 --threads 1"),
    "booster_overhead": Smoke("--pairs 2 --steps 1", ranks=2),
    "checkpoint_speed": Smoke("--rounds 1 --tensors 4 --folder build"),
    "cpu_adam": Smoke("--numel 100000 --rounds 1 --threads 1"),
    "cpu_collectives": Smoke("--turns 2 --sizes '64 KB'", ranks=2),
    "cpu_data_parallel": Smoke("--turns 2 --steps 1", ranks=2),
    "docs_check": Smoke("--runs 1"),
    "expert_block": Smoke("--turns 2 --steps 1 --tokens 32"),
    "expert_parallel": Smoke("--turns 2 --steps 1 --tokens 32", ranks=2),
    "finetune": Smoke("--pairs 2 --steps 1 --batch 2", ranks=2),
    "fsdp_overhead": Smoke("--pairs 2 --steps 1", ranks=2),
    "gemini_moves": Smoke("--hidden 64 --layers 2 --shares 0.6"),
    "import_cost": Smoke("--turns 1"),
    "nvme_step": Smoke("--layers 1 --width 16 --rounds 1"),
    "nvme_store": Smoke("--megabytes 4 --rounds 1 --only TensorFile StateStore.walk"),
    "page_overhead": Smoke("--pairs 2"),
    "pipeline": Smoke("--turns 1 --layers 4 --width 64 --tokens 32"),
    "plan_70b": Smoke("--ranks 0"),
    "precision_overhead": Smoke("--pairs 2 --steps 1", ranks=1),
    "relayout": Smoke("--pairs 100"),
    "serving": Smoke("--turns 1 --requests 3 --tokens 4 --hidden 64 --layers 1 --prefix 32"),
    "step_overhead": Smoke("--turns 2 --steps 1 --only ddp zero1-clip"),
    "tensor_parallel_mlp": Smoke("--turns 2 --repeats 1", ranks=2),
    "tensor_parallel_transformers": Smoke("--turns 2 --repeats 1", ranks=2),
    "watch_latency": Smoke("--saves 2"),
    "zero": Smoke("--turns 2 --steps 1 --only zero1-gloo-torch redundancy"),
}


def run(name: str) -> bool:
    """Run one, and print a line about it, or all that it said if it failed."""
    options, ranks = SMOKE[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, str(HERE / f"{name}.py"), *shlex.split(options)]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=HERE.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"{'FAIL' if done.returncode else 'ok':<5}{name:<30}{time.perf_counter() - started:6.1f} s", flush=True)
    print(done.stdout if done.returncode else "", end="")
    return done.returncode == 0


def main() -> int:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(SMOKE)}")
    names = parser.parse_args().names
    unknown = [name for name in names if name not in SMOKE]
    if unknown:
        parser.error(f"a name is that of a benchmark. Found {unknown[0]}. Choose from {', '.join(SMOKE)}")
    failed = [name for name in names or SMOKE if not run(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
