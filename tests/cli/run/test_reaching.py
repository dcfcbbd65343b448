"""``colossal run`` when a node cannot be reached, or lacks what it needs: the reason is told."""

import subprocess

import pytest

pytestmark = pytest.mark.slow

HELLO = "print('started', flush=True)\n"


def fails(cluster, folder, *words: str, program: str = "program.py", **settings: str) -> str:
    """Run, and return the complaint; nothing may have been started."""
    (folder / "program.py").write_text(HELLO)
    code, output, errors = cluster.run(*words, program, folder=folder, **settings)
    assert code == 1, errors
    assert "started" not in output
    assert "Traceback" not in errors
    return errors


def test_a_host_without_an_address(cluster, tmp_path) -> None:
    errors = fails(cluster, tmp_path, "--host", "node1,node9")
    assert "Error: All nodes must be reached. Found 1 of 2 missing; nothing was started.\n" in errors
    assert "  node9: The host node9 must have an address." in errors


def test_no_host_answers(cluster, tmp_path) -> None:
    errors = fails(cluster, tmp_path, "--host", "node1,node2", "--ssh-port", "2222")
    assert "Found none of them; nothing was started." in errors
    assert "  node1: root@node1:2222 must run an SSH server. Found: Connection refused." in errors
    assert "  node2: root@node2:2222 must run an SSH server. Found: Connection refused." in errors


def test_a_host_that_is_switched_off(cluster, tmp_path) -> None:
    cluster.switch("ip", "link", "set", cluster["node2"].port, "down")
    errors = fails(cluster, tmp_path, "--host", "node1,node2", "--timeout", "3")
    assert "  node2: root@node2:22 must " in errors


def test_a_host_whose_key_is_not_known(cluster, tmp_path) -> None:
    lines = cluster.known_hosts.read_text().splitlines(keepends=True)
    cluster.known_hosts.write_text("".join(line for line in lines if "node2" not in line))
    errors = fails(cluster, tmp_path, "--host", "node1,node2")
    assert "  node2: root@node2:22 must be a machine whose key is known. Found none in known_hosts." in errors
    assert "node1:" not in errors


@pytest.mark.parametrize("rule", ["", "StrictHostKeyChecking accept-new\n", "StrictHostKeyChecking no\n"])
def test_a_host_whose_key_has_changed_is_refused_whatever_the_configuration_says(rule, cluster, tmp_path) -> None:
    lines = cluster.known_hosts.read_text().splitlines()
    node3 = next(line for line in lines if "node3" in line)
    others = [line for line in lines if "node2" not in line]
    cluster.known_hosts.write_text("\n".join([*others, node3.replace("node3", "node2"), ""]))
    cluster.ssh_config.write_text(rule + cluster.ssh_config.read_text())
    errors = fails(cluster, tmp_path, "--host", "node1,node2")
    assert "  node2: root@node2:22 must show the key that is known of it. Found another one, SHA256:" in errors
    assert "ssh-keygen -R node2" in errors


def test_a_new_key_is_accepted_and_written_down_if_the_configuration_says_so(cluster, tmp_path) -> None:
    known = cluster.known_hosts.read_text().splitlines(keepends=True)
    cluster.known_hosts.write_text("".join(["# mine\n", *(line for line in known if "node2" not in line)]))
    cluster.ssh_config.write_text("StrictHostKeyChecking accept-new\n" + cluster.ssh_config.read_text())
    errors = fails(cluster, tmp_path, "--host", "node1,node2", program="missing.py")
    assert "known_hosts" not in errors
    kind, key, _ = (cluster.folder / "node2.key.pub").read_text().split()
    first, *_, last = cluster.known_hosts.read_text().splitlines()
    assert (first, last) == ("# mine", f"node2 {kind} {key}")


def test_a_jump_host_must_be_known_too(cluster, tmp_path) -> None:
    lines = cluster.known_hosts.read_text().splitlines(keepends=True)
    cluster.known_hosts.write_text("".join(line for line in lines if "node3" not in line))
    cluster.ssh_config.write_text("Host node2\n  ProxyJump root@node3\nHost *\n" + cluster.ssh_config.read_text())
    errors = fails(cluster, tmp_path, "--host", "node1,node2")
    assert "  node2: root@node2:22 must " in errors
    assert "known_hosts" in errors


def test_a_key_that_is_not_let_in(cluster, tmp_path) -> None:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")]
    subprocess.run(words, check=True)
    cluster.ssh_config.write_text(f"User root\nIdentityFile {tmp_path}/other\n")
    errors = fails(cluster, tmp_path, "--host", "node1,node2")
    assert "  node1: root@node1:22 must let this user in without a password." in errors
    assert "  node2: root@node2:22 must let this user in without a password." in errors


def test_a_user_without_any_key(cluster, tmp_path) -> None:
    cluster.ssh_config.write_text("User root\n")
    errors = fails(cluster, tmp_path, "--host", "node1,node2")
    assert "  node1: root@node1:22 must let this user in without a password." in errors


def test_a_node_without_the_python(cluster, tmp_path) -> None:
    errors = fails(cluster, tmp_path, "--host", "node1,node2", "--python", "/opt/none/bin/python")
    assert "(node 0) was lost" in errors
    assert "Its Python must start there. Found: " in errors
    assert "/opt/none/bin/python" in errors
    assert "No such file or directory" in errors


def test_a_node_without_the_program(cluster, tmp_path) -> None:
    errors = fails(cluster, tmp_path, "--host", "node1,node2", program="missing.py")
    assert f"Every node needs the program missing.py. Found none in {tmp_path}." in errors


def test_a_node_without_the_folder(cluster, tmp_path) -> None:
    errors = fails(cluster, tmp_path, "--host", "node1,node2", "--workdir", "/none/at/all")
    assert "The job runs in the folder /none/at/all on every node. Found: No such file or directory." in errors
