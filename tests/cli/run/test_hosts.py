import pytest

from colossal._src.cli.run.hosts import Host, parse_host, parse_hosts, read_hostfile, select
from colossal.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", Host("node1")),
        (" node1.cluster.example ", Host("node1.cluster.example")),
        ("ann@node1", Host("node1", "ann")),
        ("node1:2222", Host("node1", port=2222)),
        ("ann@10.0.0.1:2222", Host("10.0.0.1", "ann", 2222)),
        ("fd00::1", Host("fd00::1")),
        ("ann@fe80::1%eth0", Host("fe80::1%eth0", "ann")),
        ("[fd00::1]", Host("fd00::1")),
        ("ann@[fd00::1]:22", Host("fd00::1", "ann", 22)),
    ],
)
def test_a_host_is_read(text, host) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "@node1", "node1:", "node1:ssh", "a b", "node1:0", "node1:65536", "a@b@c", "[x"])
def test_what_is_no_host_is_refused(text) -> None:
    with pytest.raises(ConfigError, match=r"Found ''|Found '|Found"):
        parse_host(text)


def test_a_list_has_at_least_one_host_and_none_twice() -> None:
    assert [host.name for host in parse_hosts("b,a, c,")] == ["b", "a", "c"]
    with pytest.raises(ConfigError, match="Found none"):
        parse_hosts(" , ")
    with pytest.raises(ConfigError, match="Found a twice in --host"):
        parse_hosts("a,b,root@a:22")


def test_a_hostfile_is_read_with_its_slots_and_without_its_comments(tmp_path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\n\nnode1 slots=4   # with GPUs\nann@node2:2222 slots=8\n  node3\n")
    assert read_hostfile(path) == (Host("node1", slots=4), Host("node2", "ann", 2222, 8), Host("node3"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1\nnode2 slots=none\n", "Found 'slots=none' in .*hosts:2"),
        ("node1 slots=0\n", "Found 'slots=0' in .*hosts:1"),
        ("node1 node2\n", "Found 'node2' in .*hosts:1"),
        ("\nnode1:x\n", "hosts:2: A host is written as"),
        ("node1\nnode1 slots=2\n", "Found node1 twice in .*hosts"),
        ("# nobody\n", "Found none in .*hosts"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_the_line(text, found, tmp_path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=found):
        read_hostfile(tmp_path / "hosts")


def test_a_hostfile_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: it is no text"):
        read_hostfile(tmp_path / "binary")


HOSTS = parse_hosts("node1,node2,node3,node4")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({}, "node1 node2 node3 node4"),
        ({"include": "node3,node1"}, "node1 node3"),
        ({"exclude": "node1, node4"}, "node2 node3"),
        ({"num_nodes": 2}, "node1 node2"),
        ({"exclude": "node1", "num_nodes": 2}, "node2 node3"),
    ],
)
def test_hosts_are_chosen_in_their_order(choice, names) -> None:
    assert " ".join(host.name for host in select(HOSTS, **choice)) == names


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"include": "node1", "exclude": "node2"}, "Found both --include and --exclude"),
        (
            {"include": "node7"},
            "--include names hosts of the list. Found 'node7', which is not there. Did you mean node",
        ),
        ({"exclude": "gpu"}, "Found 'gpu', which is not there. The hosts are node1, node2, node3, node4."),
        ({"include": ","}, "--include names at least one host"),
        ({"exclude": "node1,node2,node3,node4"}, "Found none left"),
        ({"num_nodes": 5}, r"Found --num_nodes 5 and 4 host\(s\)"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(choice, found) -> None:
    with pytest.raises(ConfigError, match=found):
        select(HOSTS, **choice)


def test_this_machine_is_known_by_its_addresses_unless_ssh_is_asked_for() -> None:
    for name in ("localhost", "127.0.0.1", "127.1.2.3"):
        assert parse_host(name).is_local
        assert parse_host(name).is_loopback
    assert not parse_host("root@localhost").is_local
    assert not parse_host("localhost:2222").is_local
    assert not Host("198.51.100.1").is_local  # reserved for documentation: nobody has it
    assert not Host("no.such.host.invalid").is_local
