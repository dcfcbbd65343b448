"""Runs every page of a tree cold and then warm; prints what came of each. Started by test_warm.py."""

import json
import re
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "doctest"))

from pagetest.model.script import make_script  # noqa: E402
from pagetest.model.tree import Tree  # noqa: E402
from pagetest.results.result import Result  # noqa: E402
from pagetest.run.runner import Runner  # noqa: E402
from pagetest.warm.fork_server import ForkServerPool  # noqa: E402

LIMIT_SECONDS = 600.0
STARTS = {"hang": "exits_late", "hang_of_a_rank": "first_failure"}  # pages that hang, and one that starts alike
CHANCE = re.compile(r"0x[0-9a-f]+|pid[ =]\d+|\d+(?= s, killed)|process \d+|(?<=kill\()\d+|(?<=]:)\d+|/tmp/\S+")


def facts(result: Result) -> dict[str, Any]:
    """What must be the same; numbers that differ between any two runs are blanked."""
    log = result.log.read_text(encoding="utf-8", errors="replace") if result.log else ""
    kept = ("status", "device", "backend", "world", "lines_run", "lines_total", "outputs_matched", "outputs_total")
    return {name: getattr(result, name) for name in kept} | {
        "findings": [CHANCE.sub("#", str(finding)) for finding in result.findings],
        "failure": json.loads(CHANCE.sub("#", json.dumps(asdict(result.failure)))) if result.failure else None,
        "log": CHANCE.sub("#", log).replace("bin/python3", "bin/python").splitlines(),
        "seconds": result.seconds,
    }


def limit_of(name: str, found: dict[str, Any], manner: str) -> float:
    """A page that hangs must get to where it hangs, on a busy machine too: several times what another start took."""
    return 8.0 + 5.0 * found[STARTS[name]][manner]["seconds"] if name in STARTS else LIMIT_SECONDS


def main(source: Path, build: Path) -> None:
    # As docs_test.py does: what a shell starts in its background ignores SIGINT, and so would every page.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tree, servers, found = Tree(source), ForkServerPool(), {}
    try:
        for name in sorted(tree.names, key=STARTS.__contains__):
            page = tree.page(name, "en")
            cold, warm = (
                Runner(ROOT, build, limit_of(name, found, manner), start=servers.start) for manner in ("cold", "warm")
            )
            ends = {"cold": facts(cold.run(page, make_script(page)))}
            servers.start_server(warm.script_file(page), frozenset())
            ends["warm"] = facts(warm.run(page, make_script(page)))
            found[name] = {**ends, "was_forked": servers.was_forked}
    finally:
        servers.close()
    json.dump(found, sys.stdout)


main(Path(sys.argv[1]), Path(sys.argv[2]))
