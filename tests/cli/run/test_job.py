import shlex

import pytest

from colossal._src.cli.run.hosts import Host, parse_hosts
from colossal._src.cli.run.job import (
    Job,
    Rendezvous,
    choose_rendezvous,
    parse_environment,
    parse_extra,
    parse_nproc,
    program_file,
    python_folder,
)
from colossal.errors import ConfigError

MEETING = Rendezvous("node1", 29500)


def command(job: Job, rank: int = 1, num_nodes: int = 2, host: Host | None = None) -> str:
    return shlex.join(job.command(rank, num_nodes, host or Host("node2"), MEETING, "node2"))


def test_each_node_gets_its_number_and_the_same_meeting() -> None:
    job = Job("train.py", ["--lr", "0.1"], nproc_per_node="4", python="/env/bin/python")
    assert command(job) == (
        "/env/bin/python -m torch.distributed.run --nnodes=2 --nproc_per_node=4 --node_rank=1 "
        "--master_addr=node1 --master_port=29500 train.py --lr 0.1"
    )


def test_slots_give_way_to_nproc_per_node() -> None:
    assert "--nproc_per_node=3 " in command(Job("a.py"), host=Host("node2", slots=3))
    assert "--nproc_per_node=8 " in command(Job("a.py", nproc_per_node="8"), host=Host("node2", slots=3))
    assert "--nproc_per_node=1 " in command(Job("a.py"))


def test_a_module_and_more_arguments_stand_where_torchrun_wants_them() -> None:
    job = Job("pkg.train", ["-m"], is_module=True, torchrun={"tee": "3", "no_python": None})
    assert command(job).endswith("--tee=3 --no_python -m pkg.train -m")


def test_restarts_on_many_nodes_meet_again_and_again() -> None:
    words = command(Job("a.py", torchrun={"max_restarts": "3"}))
    assert "--rdzv_backend=c10d --rdzv_endpoint=node1:29500 --rdzv_id=colossal --rdzv_conf=is_host=0 " in words
    assert "--local_addr=node2 --max_restarts=3 a.py" in words
    assert "master_addr" not in words
    assert "is_host=1" in command(Job("a.py", torchrun={"max_restarts": "3"}), rank=0)
    assert "--master_addr=node1" in command(Job("a.py", torchrun={"max_restarts": "0"}))
    assert "--master_addr=node1" in command(Job("a.py", torchrun={"max_restarts": "3"}), rank=0, num_nodes=1)


def test_a_meeting_of_ones_own_is_left_alone() -> None:
    words = command(Job("a.py", torchrun={"rdzv_backend": "etcd", "rdzv_endpoint": "node9:2379"}))
    assert "--master_addr" not in words
    assert "--rdzv_backend=etcd --rdzv_endpoint=node9:2379" in words


def test_an_ipv6_endpoint_stands_in_brackets() -> None:
    assert Rendezvous("fd00::1", 29500).endpoint == "[fd00::1]:29500"
    assert Rendezvous("10.0.0.1", 29500).endpoint == "10.0.0.1:29500"


def test_more_arguments_are_read_with_dashes_or_underscores() -> None:
    texts = ["max-restarts=3, --tee=3", "no_python,,log_dir=/a b=c"]
    assert parse_extra(texts, 2) == {"max_restarts": "3", "tee": "3", "no_python": None, "log_dir": "/a b=c"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nnodes=3", "Found nnodes. Use --host or --hostfile"),
        ("master-port=1", "Found master_port. Use --master_port"),
        ("m", "Found m. Use -m"),
        ("3=4", "Found '3=4'"),
        ("standalone", "Found 2 nodes. Drop standalone"),
    ],
)
def test_arguments_that_are_decided_elsewhere_are_refused(text, found) -> None:
    with pytest.raises(ConfigError, match=found):
        parse_extra([text], 2)


def test_the_environment_that_matters_goes_along() -> None:
    own = {
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "COLOSSAL_Y": "2",
        "PYTHONPATH": "/p",
        "HOME": "/root",
        "TOKEN": "secret",
    }
    passed = {
        "NCCL_DEBUG": "INFO",
        "GLOO_X": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "COLOSSAL_Y": "2",
        "PYTHONPATH": "/p",
    }
    assert parse_environment([], own) == passed
    assert parse_environment(["TOKEN", "A=b=c", "E=", "PYTHONPATH=/q"], own) == {
        **passed, "TOKEN": "secret", "A": "b=c", "E": "", "PYTHONPATH": "/q",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="Found that it is not set. Set it, or write --env NONE=VALUE"):
        parse_environment(["NONE"], own)
    with pytest.raises(ConfigError, match="Found '2X=1'"):
        parse_environment(["2X=1"], own)


@pytest.mark.parametrize("text", [None, "1", "16", "auto", "cpu", "gpu"])
def test_a_number_of_processes(text) -> None:
    assert parse_nproc(text) == text


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_what_is_no_number_of_processes(text) -> None:
    with pytest.raises(ConfigError, match=f"Found '{text}'"):
        parse_nproc(text)


def test_the_first_host_is_node_0_unless_the_master_is_another_one() -> None:
    hosts = parse_hosts("198.51.100.1,198.51.100.2,198.51.100.3")
    assert choose_rendezvous(hosts, None, None) == (hosts, None)
    assert choose_rendezvous(hosts, "10.9.9.9", None) == (hosts, Rendezvous("10.9.9.9", 29500))
    assert choose_rendezvous(hosts, "198.51.100.2", 1234) == (
        (hosts[1], hosts[0], hosts[2]),
        Rendezvous("198.51.100.2", 1234),
    )


def test_one_node_meets_at_home_at_a_free_port() -> None:
    _, meeting = choose_rendezvous((Host("localhost"),), None, None)
    assert meeting.address == "127.0.0.1"
    assert meeting.port != 29500
    assert choose_rendezvous((Host("localhost"),), "localhost", 29500)[1] == Rendezvous("localhost", 29500)


def test_a_name_under_which_each_machine_finds_itself_is_no_meeting_place() -> None:
    with pytest.raises(ConfigError, match="Found the first host localhost, under which each machine finds itself"):
        choose_rendezvous(parse_hosts("localhost,198.51.100.2"), None, None)
    assert choose_rendezvous(parse_hosts("localhost,127.0.0.1"), None, None)[1] == Rendezvous("localhost", 29500)


def test_only_a_program_in_a_file_can_be_missing() -> None:
    assert program_file(Job("train.py")) == "train.py"
    assert program_file(Job("pkg.train", is_module=True)) == ""
    assert program_file(Job("bash", torchrun={"no_python": None})) == ""
    assert python_folder("/env/bin/python") == "/env/bin"
    assert python_folder("python3") == ""
