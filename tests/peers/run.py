"""Compare each pair of programs in ``examples/coming_from``: another library's on two CPU ranks, and ours.

``nox -s peers`` makes an environment for each library, runs ``python tests/peers/run.py accelerate`` there, and at the
end ``python tests/peers/run.py --table``, which writes ``docs/measured/peers.md``.
"""

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/helpers"))
import training_pairs  # noqa: E402

FOUND = ROOT / "build/peers"
TABLE = ROOT / "docs/measured/peers.md"
PACKAGES = {
    "accelerate": ["accelerate"],
    "deepspeed": ["deepspeed"],
    "fsdp2": ["torch"],
    "lightning": ["lightning"],
    "trainer": ["transformers", "accelerate"],
}
NAMES = {
    "accelerate": {"accelerator": "accelerate:Accelerator", "Accelerator": "accelerate:Accelerator"},
    "deepspeed": {"engine": "deepspeed.runtime.pipe.engine:PipelineEngine", "deepspeed": "deepspeed"},
    "fsdp2": {
        "CPUOffloadPolicy": "torch.distributed.fsdp:CPUOffloadPolicy",
        "DistributedDataParallel": "torch.nn.parallel:DistributedDataParallel",
        "DistributedSampler": "torch.utils.data:DistributedSampler",
        "MixedPrecisionPolicy": "torch.distributed.fsdp:MixedPrecisionPolicy",
        "StateDictOptions": "torch.distributed.checkpoint.state_dict:StateDictOptions",
        "autocast": "torch:autocast",
        "dcp": "torch.distributed.checkpoint",
        "ddp": "torch.nn.parallel:DistributedDataParallel",
        "fully_shard": "torch.distributed.fsdp:fully_shard",
        "get_state_dict": "torch.distributed.checkpoint.state_dict:get_state_dict",
        "init_process_group": "torch.distributed:init_process_group",
        "model": "torch.distributed.fsdp:FSDPModule",
        "nn": "torch.nn",
        "sampler": "torch.utils.data:DistributedSampler",
        "set_state_dict": "torch.distributed.checkpoint.state_dict:set_state_dict",
        "torch": "torch",
    },
    "lightning": {
        "fabric": "lightning:Fabric",
        "module": "lightning:LightningModule",
        "trainer": "lightning:Trainer",
        "Trainer": "lightning:Trainer",
    },
    "trainer": {"trainer": "transformers:Trainer"},
}
"""What the names in the tables of a library's page stand for."""
ATTRIBUTES = {"ddp.module", "engine.module", "model.to_empty"}  # which instances have, or their other base class
TOLERANCE = 1e-5


def run(peer: str, side: str, folder: Path) -> list[float]:
    """Run one program on two ranks, and read the losses, and the accuracy if it has one, that it prints."""
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "1",
        "COLOSSAL_DEVICE": "cpu",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "TORCH_EXTENSIONS_DIR": str(FOUND / "extensions"),  # DeepSpeed compiles one
    }
    place = folder / side
    place.mkdir()
    if (folder / "inputs").exists():
        (place / "inputs").symlink_to(folder / "inputs")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(training_pairs.PROGRAMS / f"{peer}_{side}.py")]
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise SystemExit(f"{peer}_{side}.py failed:\n{done.stdout}{done.stderr}")
    lines = re.findall(r"^(?:epoch \d:|losses|accuracy) (.*)$", done.stdout, re.MULTILINE)
    return [float(number) for line in lines for number in line.split()]


def unknown_calls(peer: str) -> dict[str, list[str]]:
    """What the tables of a page name of the other library and is not there."""
    roots: dict[str, Any] = {}
    for name, origin in NAMES[peer].items():
        module, _, attribute = origin.partition(":")
        found = importlib.import_module(module)
        roots[name] = getattr(found, attribute) if attribute else found
    text = training_pairs.page_of(peer, "en").read_text(encoding="utf-8")
    calls = set(training_pairs.calls_in_column(text, 0))
    unknown = {call: training_pairs.unknown_names(call, roots) for call in calls if "." in call or "(" in call}
    return {call: names for call, names in unknown.items() if names and not ATTRIBUTES.issuperset(names)}


def compare(peer: str) -> None:
    """Run both programs of a pair, compare what they print, and keep it for the table."""
    if unknown := unknown_calls(peer):
        raise SystemExit(f"the page of {peer} names what its library does not have: {unknown}")
    with TemporaryDirectory() as name:
        folder = Path(name)
        if peer == "trainer":
            sys.path.insert(0, str(ROOT / "src"))
            from colossal.testing import make_finetuning_inputs

            make_finetuning_inputs(folder / "inputs")
        theirs, ours = (run(peer, side, folder) for side in ("before", "after"))
    if not theirs or len(theirs) != len(ours):
        raise SystemExit(f"{peer}: their program printed {len(theirs)} numbers, ours {len(ours)}")
    worst = max(abs(a - b) for a, b in zip(theirs, ours, strict=True))
    packages = {"python": platform.python_version()}
    packages |= {name: version(name) for name in dict.fromkeys([*PACKAGES[peer], "torch"])}
    print(f"{peer}: {packages}, {len(theirs)} numbers, largest difference {worst:.1e}")
    if worst > TOLERANCE:
        raise SystemExit(f"{peer}: the losses differ: {theirs} {ours}")
    FOUND.mkdir(parents=True, exist_ok=True)
    row = {
        "packages": packages,
        "theirs": theirs,
        "ours": ours,
        "worst": worst,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    (FOUND / f"{peer}.json").write_text(json.dumps(row), encoding="utf-8")


def write_table() -> None:
    """Write the record from what all pairs left."""
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True).strip()
    rows = {peer: json.loads((FOUND / f"{peer}.json").read_text(encoding="utf-8")) for peer in training_pairs.PEERS}
    lines = [
        "# Beside other libraries",
        "",
        f"`examples/coming_from` on 2 CPU ranks; commit {commit}.",
        "",
        "| pair | versions | date | numbers | largest difference |",
        "| --- | --- | --- | --- | --- |",
    ]
    for peer, row in rows.items():
        packages = ", ".join(f"{name} {number}" for name, number in row["packages"].items())
        lines.append(f"| {peer} | {packages} | {row['date']} | {len(row['ours'])} | {row['worst']:.1e} |")
    for peer, row in rows.items():
        lines += ["", f"## {peer}", "", "```text"]
        lines += [f"{side}: {' '.join(f'{number:.6f}' for number in row[side])}" for side in ("theirs", "ours")]
        lines.append("```")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=", ".join(training_pairs.PEERS))
    parser.add_argument("--table", action="store_true", help="write docs/measured/peers.md from the last runs")
    options = parser.parse_args()
    for peer in options.peers:
        compare(peer)
    if options.table:
        write_table()


if __name__ == "__main__":
    main()
