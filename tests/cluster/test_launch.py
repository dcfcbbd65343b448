# pyright: reportArgumentType=false, reportInvalidTypeForm=false, reportReturnType=false
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ports import free_port
from torch import distributed as dist

import colossal
from colossal._src.cluster import current_config, rendezvous
from colossal._src.cluster.mesh import set_ambient_mesh
from colossal._src.cluster.process_spec import ProcessSpec
from colossal._src.cluster.rendezvous import WorldSpec, connect_to_store, connecting, form_world
from colossal._src.cluster.watchdog import watchdog_settings
from colossal._src.testing.limits import scaled
from colossal.cluster import Config, DistCoordinator, current_mesh, get_default_parser
from colossal.errors import ConfigError, LaunchError, MeshError
from colossal.testing import fake_world, run_processes

pytestmark = pytest.mark.slow

TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def left() -> None:
    yield
    set_ambient_mesh(None)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def ended() -> Iterator[None]:
    """Wait for what torch still does in the background after a launch has given up on it."""
    yield
    for thread in threading.enumerate():
        if thread.name == "colossal-launch":
            thread.join(20)


def report() -> tuple[object, ...]:
    coordinator, mesh = DistCoordinator(), current_mesh()
    total = torch.tensor(1.0)
    dist.all_reduce(total, group=mesh.group("dp"))
    return coordinator.rank, coordinator.world_size, coordinator.local_rank, total.item(), dist.get_backend()


def launch_natively(port: int, host: str = "127.0.0.1") -> tuple[object, ...]:
    colossal.launch(int(os.environ["TEST_RANK"]), 2, host, port, verbose=False)
    return report()


def launch_by(name: str, *args: object) -> tuple[object, ...]:
    getattr(colossal, name)(*args, verbose=False)
    return report()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_launch_finds_its_peers_and_its_place_on_the_host(host) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    places = run_processes(launch_natively, 2, free_port(), host, form=False, environment={"TEST_RANK": "{rank}"})
    assert places == [(0, 2, 0, 2.0, "shm"), (1, 2, 1, 2.0, "shm")]


def test_launch_from_slurm() -> None:
    environment = {"SLURM_PROCID": "{rank}", "SLURM_NPROCS": "2", "SLURM_LOCALID": "0"}
    args = ("launch_from_slurm", "127.0.0.1", free_port())
    places = run_processes(launch_by, 2, *args, form=False, environment=environment)
    assert places == [(0, 2, 0, 2.0, "shm"), (1, 2, 0, 2.0, "shm")]


def test_launch_from_openmpi() -> None:
    names = ("RANK", "LOCAL_RANK")
    environment = {f"OMPI_COMM_WORLD_{name}": "{rank}" for name in names} | {"OMPI_COMM_WORLD_SIZE": "2"}
    args = ("launch_from_openmpi", "127.0.0.1", free_port())
    places = run_processes(launch_by, 2, *args, form=False, environment=environment)
    assert places == [(0, 2, 0, 2.0, "shm"), (1, 2, 1, 2.0, "shm")]


def test_launch_from_torch_with_the_variables_of_torchrun() -> None:
    environment = dict(zip(TORCH, ("{rank}", "2", "{rank}", "127.0.0.1", str(free_port())), strict=True))
    places = run_processes(launch_by, 2, "launch_from_torch", form=False, environment=environment)
    assert places == [(0, 2, 0, 2.0, "shm"), (1, 2, 1, 2.0, "shm")]


PAGE = """
import os
import colossal
mesh = colossal.launch_from_torch()
os.write(1, f"rank {mesh.global_rank} of {mesh.world_size}\\n".encode())  # in one piece, unlike print
"""


def test_torchrun_and_a_bare_interpreter_run_the_same_program(tmp_path) -> None:
    page = tmp_path / "page.py"
    page.write_text(PAGE)
    environment = {name: value for name, value in os.environ.items() if name not in TORCH} | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for launcher, expected in (([sys.executable], {"rank 0 of 1"}), (torchrun, {"rank 0 of 2", "rank 1 of 2"})):
        done = subprocess.run([*launcher, str(page)], env=environment, capture_output=True, text=True, check=True)
        assert set(done.stdout.split("\n")) - {""} == expected
        assert "Warning" not in done.stderr


@pytest.mark.usefixtures("left")
def test_a_world_of_one_needs_no_variables(monkeypatch, capfd) -> None:
    for name in TORCH:
        monkeypatch.delenv(name, raising=False)
    mesh = colossal.launch_from_torch(seed=7)
    assert (mesh.world_size, mesh.global_rank, mesh.local_rank) == (1, 0, 0)
    drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())  # noqa: S311, NPY002
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)
    assert drawn == (random.random(), float(np.random.rand()), torch.rand(()).item())  # noqa: S311, NPY002
    assert "1 process(es), cpu, shm, seed 7" in capfd.readouterr().err
    with pytest.raises(LaunchError, match="rank 0 of 1 already"):
        colossal.launch_from_torch()


def test_a_world_that_exists_is_not_launched_again() -> None:
    with fake_world(4, rank=1), pytest.raises(LaunchError, match="rank 1 of 4 already"):
        colossal.launch(0, 1, "localhost", 29500)


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ((2, 2, "localhost", 29500), "Found rank=2 in a world of 2"),
        ((-1, 2, "localhost", 29500), "Found rank=-1"),
        ((0, 0, "localhost", 29500), "Found world_size=0"),
        ((0, 1, "localhost", 0), "Found port=0"),
        ((0, 1, "localhost", 70000), "Found port=70000"),
        ((0, 1, "", 29500), "Found an empty host"),
        ((None, 1, "localhost", 29500), "rank is an integer. Found None"),
        ((0, "1", "localhost", 29500), "world_size is an integer. Found '1'"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(place, found) -> None:
    with pytest.raises(LaunchError, match=found):
        colossal.launch(*place)


@pytest.mark.parametrize(
    ("name", "args", "variables"),
    [
        ("launch_from_torch", (), TORCH),
        ("launch_from_slurm", ("localhost", 29500), ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")),
        (
            "launch_from_openmpi",
            ("localhost", 29500),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ),
    ],
)
def test_a_missing_or_odd_variable_is_named(name, args, variables, monkeypatch) -> None:
    for variable in variables:
        monkeypatch.setenv(variable, "0")
    monkeypatch.delenv(variables[1])
    with pytest.raises(LaunchError, match=f"Found no {variables[1]}"):
        getattr(colossal, name)(*args)
    monkeypatch.setenv(variables[1], "two")
    with pytest.raises(LaunchError, match=f"{variables[1]} is an integer. Found 'two'"):
        getattr(colossal, name)(*args)


def test_a_busy_port_is_named() -> None:
    with closing(socket.socket()) as busy:
        busy.bind(("0.0.0.0", 0))  # noqa: S104 (rank 0 listens on all interfaces)
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Found 127.0.0.1:{port} in use by another program"):
            colossal.launch(0, 1, "127.0.0.1", port, verbose=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_comes_is_an_error_within_the_timeout(rank) -> None:
    started = time.monotonic()
    match = "Found no rank 1" if rank == 0 else "Found no program that listens there: Connection refused"
    with pytest.raises(LaunchError, match=match):
        colossal.launch(rank, 2, "127.0.0.1", free_port(), verbose=False, timeout_seconds=1)
    assert time.monotonic() - started < 20


@pytest.mark.usefixtures("ended")
def test_a_port_held_by_a_silent_program_is_an_error_within_the_timeout() -> None:
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = rf"rank 0 at 127.0.0.1:{port} within 1 s. Found a connection without an answer: another program holds"
        with pytest.raises(LaunchError, match=found):
            colossal.launch(1, 2, "127.0.0.1", port, verbose=False, timeout_seconds=1)
    assert time.monotonic() - started < 20


def test_a_program_ends_although_torch_still_waits_for_a_silent_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        program = f"import colossal; colossal.launch(1, 2, '127.0.0.1', {silent.getsockname()[1]}, timeout_seconds=1)"
        done = subprocess.run(
            [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=scaled(120)
        )
    assert done.returncode == 1
    assert "colossal.errors.LaunchError: Rank 1 must reach rank 0" in done.stderr


@pytest.mark.usefixtures("ended")
def test_a_port_held_by_a_program_that_talks_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            for _ in range(2):  # the first one only looks whether anybody listens
                guest, _ = server.accept()
                guest.sendall(b"220 mail.example.org ESMTP\r\n")
                time.sleep(0.5)
                guest.close()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(greet)
            with pytest.raises(LaunchError, match="another program holds the port"):
                colossal.launch(1, 2, "127.0.0.1", server.getsockname()[1], verbose=False, timeout_seconds=0.2)


def launch_with_own_size(port: int, sizes: list[int], folder: Path) -> str:
    """Return the error of this rank; one that has none leaves only after the others had theirs."""
    rank = int(os.environ["TEST_RANK"])
    try:
        colossal.launch(rank, sizes[rank], "127.0.0.1", port, verbose=False, timeout_seconds=20)
    except LaunchError as error:
        (folder / str(rank)).touch()
        return str(error)
    while len(list(folder.iterdir())) < len(sizes) - 1:
        time.sleep(0.02)
    return "launched"


@pytest.mark.parametrize("sizes", [[3, 2], [2, 3]])
def test_world_sizes_that_differ_are_named_on_all_ranks(sizes, tmp_path) -> None:
    environment = {"TEST_RANK": "{rank}"}
    errors = run_processes(launch_with_own_size, 2, free_port(), sizes, tmp_path, form=False, environment=environment)
    named = f"world_size=2 on rank {sizes.index(2)} and world_size=3 on rank {sizes.index(3)}"
    assert all(f"Found {named}." in error for error in errors)


def test_a_rank_whose_first_rank_is_a_world_of_its_own_is_told(tmp_path) -> None:
    environment, sizes = {"TEST_RANK": "{rank}"}, [1, 2]
    first, second = run_processes(
        launch_with_own_size, 2, free_port(), sizes, tmp_path, form=False, environment=environment
    )
    assert first == "launched"
    assert "Found world_size=1 on rank 0 and world_size=2 on rank 1." in second


def launch_without_rank_0(port: int, folder: Path) -> str:
    """Let rank 0 stop after it has met the others, before it says what host it is on."""
    if os.environ["TEST_RANK"] == "0":
        store = connect_to_store(ProcessSpec(0, 2, "127.0.0.1", port, None), 20.0)
        while not list(folder.iterdir()):
            time.sleep(0.02)
        return repr(store)
    try:
        colossal.launch(1, 2, "127.0.0.1", port, verbose=False, timeout_seconds=1)
    except RuntimeError as error:
        (folder / "1").touch()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_torch_raises_while_processes_connect_is_a_launch_error(tmp_path) -> None:
    environment = {"TEST_RANK": "{rank}"}
    _, error = run_processes(launch_without_rank_0, 2, free_port(), tmp_path, form=False, environment=environment)
    assert error.startswith(
        "LaunchError: All 2 processes must connect to each other within 1 s. Found that rank 1 could"
    )


def test_a_mesh_that_cannot_be_formed_is_a_launch_error_and_what_the_user_chose_is_not() -> None:
    world = WorldSpec(dist.HashStore(), 1, 2, 3.0)
    with (
        pytest.raises(LaunchError, match=r"within 3 s. Found that rank 1 could not: connection reset"),
        connecting(world),
    ):
        raise dist.DistNetworkError("connection reset\nstack of torch")
    with pytest.raises(MeshError, match="as it was"), connecting(world):
        raise MeshError("as it was")


def launch_slowly(port: int) -> tuple[float, float]:
    """Return when this rank was connected, and when it was launched."""
    connect, connected = dist.init_process_group, []

    def connect_and_dawdle(*args: Any, **options: Any) -> None:
        connect(*args, **options)
        time.sleep(0.5 * dist.get_rank())
        connected.append(time.monotonic())

    dist.init_process_group = connect_and_dawdle
    colossal.launch(int(os.environ["TEST_RANK"]), 2, "127.0.0.1", port, verbose=False)
    return connected[0], time.monotonic()


def test_nobody_is_launched_and_may_end_before_all_are_connected() -> None:
    moments = run_processes(launch_slowly, 2, free_port(), form=False, environment={"TEST_RANK": "{rank}"})
    assert min(launched for _, launched in moments) >= max(connected for connected, _ in moments)


def lose_the_peer(port: int) -> str:
    rank = int(os.environ["TEST_RANK"])
    mesh = colossal.launch(rank, 2, "127.0.0.1", port, verbose=False, timeout_seconds=4)
    if rank == 1:
        time.sleep(8)
        return "left out"
    try:
        dist.all_reduce(torch.ones(()), group=mesh.group("dp"))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_timeout_reaches_the_collectives() -> None:
    environment = {"TEST_RANK": "{rank}"}
    error, _ = run_processes(lose_the_peer, 2, free_port(), form=False, environment=environment)
    assert "within 4 s. Found that rank 1 did not come." in error


@pytest.mark.parametrize(("seconds", "variable"), [(0, None), (-1.5, None), (None, "soon")])
def test_a_timeout_is_a_positive_number(seconds, variable, monkeypatch) -> None:
    if variable:
        monkeypatch.setenv("COLOSSAL_TIMEOUT_SECONDS", variable)
    with pytest.raises(ConfigError, match="The timeout is a number of seconds"):
        colossal.launch(0, 1, "127.0.0.1", free_port(), timeout_seconds=seconds)


@pytest.mark.usefixtures("left")
def test_the_timeout_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("COLOSSAL_TIMEOUT_SECONDS", "33")
    assert colossal.launch(0, 1, "127.0.0.1", free_port(), verbose=False).timeout_seconds == 33


@pytest.mark.usefixtures("left")
def test_a_backend_that_is_given_is_obeyed() -> None:
    colossal.launch(0, 1, "127.0.0.1", free_port(), backend="fake", verbose=False)
    assert dist.get_backend() == "fake"


def test_a_backend_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pigeon', which this torch lacks"):
        colossal.launch(0, 1, "127.0.0.1", free_port(), backend="pigeon")


@pytest.mark.parametrize("backend", ["cuda:gloo", "cuda:gloo,xpu:gloo"])
def test_a_backend_for_other_devices_is_refused(backend) -> None:
    with pytest.raises(ConfigError) as caught:
        colossal.launch(0, 1, "127.0.0.1", free_port(), backend=backend)
    required, found, advice = str(caught.value).split(". ")
    assert required == "The backend must move tensors of the device 'cpu'"
    assert found.startswith(f"Found {backend!r}, which moves those of 'cuda'")
    assert advice.startswith("Leave backend out")
    assert not dist.is_initialized()


def launch_with_nccl(name: str, port: int) -> tuple[object, list[str]]:
    """Return the backend in use, and what this rank was warned of."""
    warnings = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("colossal").addHandler(handler)
    backend = get_default_parser().parse_args(["--backend", "nccl"]).backend
    places = {
        "launch": (int(os.environ["RANK"]), 2, "127.0.0.1", port),
        "launch_from_slurm": ("127.0.0.1", port),
        "launch_from_openmpi": ("127.0.0.1", port),
    }
    getattr(colossal, name)(*places.get(name, ()), backend=backend, verbose=False)
    return report()[-2:], warnings


@pytest.mark.parametrize("name", ["launch", "launch_from_torch", "launch_from_slurm", "launch_from_openmpi"])
def test_the_documented_default_nccl_stands_for_the_backend_of_a_cpu(name) -> None:
    port = free_port()
    environment = dict(zip(TORCH, ("{rank}", "2", "{rank}", "127.0.0.1", str(port)), strict=True))
    environment |= {"SLURM_PROCID": "{rank}", "SLURM_NPROCS": "2", "SLURM_LOCALID": "{rank}"}
    environment |= {f"OMPI_COMM_WORLD_{name}": "{rank}" for name in ("RANK", "LOCAL_RANK")}
    environment |= {"OMPI_COMM_WORLD_SIZE": "2"}
    first, second = run_processes(launch_with_nccl, 2, name, port, form=False, environment=environment)
    assert first[0] == second[0] == (2.0, "shm")
    assert [len(warnings) for _, warnings in (first, second)] == [1, 0]
    assert first[1][0].endswith("The backend 'nccl' moves tensors of GPUs. Found the device 'cpu', and uses 'shm'.")


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("variable", [None, "nccl"])
def test_the_variable_may_say_nccl_as_well(variable, monkeypatch, capsys) -> None:
    if variable:
        monkeypatch.setenv("COLOSSAL_BACKEND", variable)
    colossal.launch(0, 1, "127.0.0.1", free_port(), verbose=False)
    assert dist.get_backend() == "shm"
    assert capsys.readouterr().err.count("WARNING") == (variable == "nccl")


CONFIG = {"BATCH_SIZE": 8, "fp16": {"mode": "torch"}}


def config_in(folder: Path) -> Path:
    path = folder / "config.py"
    path.write_text(f"import os\nclass Own: ...\nBATCH_SIZE = {CONFIG['BATCH_SIZE']}\nfp16 = dict(mode='torch')\n")
    return path


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("form", ["dict", "Config", "path", "str", "keyword", "keyword of a dict", "empty"])
@pytest.mark.parametrize("name", ["launch", "launch_from_torch"])
def test_a_config_comes_first_or_by_its_name(name, form, tmp_path) -> None:
    forms = {"dict": CONFIG, "Config": Config(CONFIG), "path": config_in(tmp_path), "str": str(config_in(tmp_path))}
    config = {} if form == "empty" else forms.get(form, CONFIG)
    others = (0, 1, "localhost", free_port()) if name == "launch" else ()
    if form.startswith("keyword"):
        getattr(colossal, name)(*others, config=config, verbose=False)
    else:
        getattr(colossal, name)(config, *others, verbose=False)
    assert current_config() == ({} if form == "empty" else CONFIG)
    DistCoordinator().destroy()
    assert current_config() is None


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((), {"config": "settings.yaml"}, "Found no such file at .*settings.yaml"),
        (("./nothing.py",), {}, "Found no such file at .*nothing.py"),
        ((Path("nothing.py"),), {}, "Found no such file"),
        ((np,), {}, "Found <module 'numpy'"),
        ((), {"config": 3}, "Found 3 of the type int"),
        (({},), {"config": {}}, "takes one config. Found two"),
        (("gloo", CONFIG), {}, r"Found one as seed: .* Call launch_from_torch\(config=...\)"),
        (({"parallel": {"tensor": 4}},), {}, "Tensor parallelism has a mode"),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error(args, kwargs, found) -> None:
    with pytest.raises(ConfigError, match=found):
        colossal.launch_from_torch(*args, **kwargs)


@pytest.mark.usefixtures("ended")
def test_a_host_may_end_like_a_python_file() -> None:
    with pytest.raises(LaunchError, match="rank 0 at node.una.py:29500"):
        colossal.launch(1, 2, "node.una.py", 29500, timeout_seconds=0.1)


def test_the_parser_takes_a_programs_own_arguments() -> None:
    parser = get_default_parser()
    parser.add_argument("--epochs", type=int)
    words = "--config c.py --host h --port 1 --world_size 2 --rank 0 --local_rank 0 --backend gloo --epochs 3"
    args = parser.parse_args(words.split(" "))
    assert (args.host, args.port, args.world_size, args.rank, args.local_rank) == ("h", 1, 2, 0, 0)
    assert (args.config, args.backend, args.seed, args.epochs) == ("c.py", "gloo", 1024, 3)


def test_nothing_is_ambient_before_launch() -> None:
    with pytest.raises(MeshError):
        current_mesh()


def launch_elsewhere(port: int) -> tuple[object, ...]:
    colossal.launch(int(os.environ["RANK"]), 2, "127.0.0.1", port, verbose=False, timeout_seconds=10)
    return report()


def test_launch_under_torchrun_may_meet_at_another_port() -> None:
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment["RANK"] = "{rank}"
    places = run_processes(launch_elsewhere, 2, free_port(), form=False, environment=environment)
    assert places == [(0, 2, 0, 2.0, "shm"), (1, 2, 1, 2.0, "shm")]


NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000"}


@pytest.mark.parametrize(
    ("backend", "own", "added"),
    [
        ("nccl", {}, NCCL),
        ("cuda:nccl", NCCL, {}),
        ("nccl", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, {k: v for k, v in NCCL.items() if "FR" not in k}),
        ("nccl", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, {k: v for k, v in NCCL.items() if "ASYNC" not in k}),
        ("gloo", {}, {}),
        ("pretend", {}, {}),
    ],
)
def test_the_watchdog_is_told_what_its_user_has_not_said(backend, own, added) -> None:
    assert watchdog_settings(backend, own) == added


def test_the_watchdog_is_told_before_there_is_a_group(monkeypatch) -> None:
    seen: list[str | None] = []

    def init(*_: object, **__: object) -> None:
        seen.append(os.environ.get("TORCH_FR_BUFFER_SIZE"))
        raise RuntimeError("no GPU here")

    for name in NCCL:
        monkeypatch.setenv(name, "x")  # which is taken back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(LaunchError, match="no GPU here"):
        form_world(WorldSpec(dist.HashStore(), 0, 1, 5.0), "nccl")
    monkeypatch.setattr(rendezvous, "get_accelerator", lambda: SimpleNamespace(is_cpu=False))
    with pytest.raises(LaunchError, match="no GPU here"):
        form_world(WorldSpec(dist.HashStore(), 0, 1, 5.0), "nccl")
    assert seen == [None, "2000"], "only beside an accelerator"
