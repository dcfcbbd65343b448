"""``colossal run`` over SSH, between machines in network namespaces: what a job does there."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

pytestmark = pytest.mark.slow

HELLO = """
import os, sys
os.write(2, ("err from " + os.environ["GROUP_RANK"] + "\\n").encode())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
place = " ".join(os.environ[name] for name in names)
line = [place, os.uname().nodename, sys.argv[1:], os.environ.get("NCCL_DEBUG"), os.environ.get("MINE")]
os.write(1, (" ".join(map(str, line)) + "\\n").encode())  # in one piece, unlike print
"""


def own(text: str) -> list[str]:
    """The lines without those of torch itself, sorted."""
    return sorted({line for line in text.splitlines() if "[c10d]" not in line})


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
    # torchrun itself may have something to say on a busy machine, where one node's agent leaves before the other's.
    from_ranks = [line for line in own(errors) if "err from" in line]
    assert from_ranks == ["node1 | err from 0", "node2 | err from 1"]


def test_a_hostfile_gives_each_node_its_slots_and_the_master_is_node_0(cluster, program, tmp_path) -> None:
    program(HELLO, "hello.py")
    (tmp_path / "hosts").write_text("node1 slots=2  # the first\nroot@node2:22\nnode3\n\n# that is all\n")
    words = ["--hostfile", "hosts", "--exclude", "node2", "--master-addr", "node3", "--master-port", "29611"]
    code, output, errors = cluster.run(*words, "-m", "hello", folder=tmp_path, env={"PYTHONPATH": "."})
    assert code == 0, errors
    assert sorted(output.splitlines()) == [
        "node1 | 1 3 0 1 node3 29611 node1 [] None None",
        "node1 | 2 3 1 1 node3 29611 node1 [] None None",
        "node3 | 0 3 0 0 node3 29611 node3 [] None None",
    ]


def test_a_node_that_is_this_machine_needs_no_ssh(cluster, program, tmp_path) -> None:
    cluster.known_hosts.write_text(
        "".join(line for line in cluster.known_hosts.read_text().splitlines(keepends=True) if "node1" not in line)
    )
    words = ["--host", "node1,node2", str(program(HELLO))]
    code, output, errors = cluster.run(*words, folder=tmp_path, at="node1")
    assert code == 0, errors
    assert sorted(output.splitlines()) == [
        "node1 | 0 2 0 0 node1 29500 node1 [] None None",
        "node2 | 1 2 0 1 node1 29500 node2 [] None None",
    ]


TRAIN = """
import json
import sys
import torch
from torch import nn
from torch.nn.functional import mse_loss
import colossal
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin

mesh = colossal.launch_from_torch(seed=3, verbose=False)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, target = torch.randn(3, 6, 4), torch.randn(3, 6, 1)
booster = Booster(plugin=TorchDDPPlugin())
model, optimizer, *_ = booster.boost(model, optimizer)
share = slice(mesh.global_rank, None, mesh.world_size)
for inputs, wanted in zip(data, target):
    loss = mse_loss(model(inputs[share]), wanted[share])
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
if mesh.global_rank == 1:
    state = {name: value.tolist() for name, value in model.unwrap().state_dict().items()}
    open(sys.argv[1], "w").write(json.dumps(state))
"""


def alone() -> dict[str, torch.Tensor]:
    """The same training in one process."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(3, 6, 4), torch.randn(3, 6, 1)
    for inputs, wanted in zip(data, target, strict=True):
        mse_loss(model(inputs), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_training_on_three_nodes_equals_one_process(cluster, program, tmp_path) -> None:
    words = ["--host", "node1,node2,node3", str(program(TRAIN)), "state.json"]
    code, _, errors = cluster.run(*words, folder=tmp_path)
    assert code == 0, errors
    state = json.loads((tmp_path / "state.json").read_text())
    for name, value in alone().items():
        torch.testing.assert_close(torch.tensor(state[name]), value, rtol=1e-5, atol=1e-6)


LINES = """
import os, sys
for number in range(20_000):
    stream = (sys.stdout, sys.stderr)[number % 2]
    stream.write(f"{number} " + "x" * (number % 50) + "\\n")
"""


def test_much_output_comes_whole_and_in_order(cluster, program, tmp_path) -> None:
    code, output, errors = cluster.run("--host", "node1,node2", str(program(LINES)), folder=tmp_path)
    assert code == 0, errors[-2000:]
    for node in ("node1", "node2"):
        mine = re.findall(rf"^{node} \| \d+ x*$", output + errors, re.MULTILINE)
        wanted = [f"{node} | {number} " + "x" * (number % 50) for number in range(20_000)]
        assert mine == wanted[0::2] + wanted[1::2]


ONCE = """
import os, pathlib, signal, sys
import torch
import torch.distributed as dist
import colossal

mesh = colossal.launch_from_torch(verbose=False, timeout_seconds=30)
mark = pathlib.Path(sys.argv[1])
for step in range(3):
    total = torch.ones(())
    dist.all_reduce(total)
    if step == 1 and mesh.global_rank == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
print("sum", total.item(), "of", mesh.world_size, "with node", os.environ["GROUP_RANK"], flush=True)
"""


def test_ranks_on_all_nodes_are_restarted_after_one_was_killed(cluster, program, tmp_path) -> None:
    words = ["--host", "node1,node2", "--extra_launch_args", "max_restarts=3", str(program(ONCE)), "mark"]
    code, output, errors = cluster.run(*words, folder=tmp_path)
    assert code == 0, errors
    assert (tmp_path / "mark").exists()
    assert sorted(line.split("|")[1] for line in output.splitlines()) == [
        " sum 2.0 of 2 with node 0",
        " sum 2.0 of 2 with node 1",
    ]


def test_names_of_the_ssh_configuration_hold(cluster, program, tmp_path) -> None:
    cluster.ssh_config.write_text(
        "Host first\n  HostName node1\nHost second\n  HostName node2\n  ProxyJump root@node3\nHost *\n"
        + cluster.ssh_config.read_text()
    )
    code, output, errors = cluster.run("--host", "first,second", str(program(HELLO)), folder=tmp_path)
    assert code == 0, errors
    assert sorted(output.splitlines()) == [
        "first  | 0 2 0 0 node1 29500 node1 [] None None",
        "second | 1 2 0 1 node1 29500 node2 [] None None",
    ]
