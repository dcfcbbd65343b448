"""``colossal run`` over SSH, between machines in network namespaces."""

import signal
import time

import pytest

HELLO = """
import os, sys
sys.stderr.write("err from " + os.environ["GROUP_RANK"] + "\\n")
line = " ".join(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"))
print(line, os.uname().nodename, sys.argv[1:], os.environ.get("NCCL_DEBUG"), os.environ.get("MINE"), flush=True)
"""


def test_every_node_runs_its_ranks_and_is_named_in_front_of_its_lines(cluster, program, tmp_path) -> None:
    words = ["--host", "node1,node2", "--nproc_per_node", "2", "--env", "MINE=a 'b' $c", str(program(HELLO))]
    code, output, errors = cluster.run(*words, "--x", "two words", folder=tmp_path, env={"NCCL_DEBUG": "WARN"})
    assert code == 0, errors
    rest = "['--x', 'two words'] WARN a 'b' $c"
    assert sorted(output.splitlines()) == [
        f"node{node + 1} | {2 * node + local} 4 {local} {node} node1 29500 node{node + 1} {rest}"
        for node in range(2)
        for local in range(2)
    ]
    assert sorted(set(errors.splitlines())) == ["node1 | err from 0", "node2 | err from 1"]
