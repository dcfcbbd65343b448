"""The pretend accelerator: pages run on it, and those that say nothing about a device are left out with a reason."""

import os
import shutil

import pytest

from pagetest import cli
from pagetest.graph.fingerprint import DEVICE_FILES, common_inputs
from pagetest.model.tree import Tree
from pagetest.run.device import DEVICES, Device
from pagetest.run.exempt import why_exempt

from .conftest import ROOT

pytestmark = pytest.mark.slow

LEFT_OUT = "features/cpu_collectives"
MOVED = """
import torch
import torch.distributed as dist

import colossal
from colossal.accelerator import get_current_device

colossal.launch_from_torch(verbose=False)
net = torch.nn.Linear(4, 1).to(get_current_device())
net(torch.ones(2, 4, device=get_current_device())).sum().backward()
dist.all_reduce(net.bias.grad)
print(net.bias.grad.device.type, net.bias.grad.item())
"""
SHOWN = "```text output\npretend 4.0\n```"

needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX") or "g++"), reason="the device is built by a C++ compiler, and there is none"
)


FRONT = "---\nkind: concept\noutcome: Know what stays on the CPU\nminutes: 1\ndevices: cpu\n---\n\n"


def add_left_out(docs, code: str) -> None:
    docs.write(LEFT_OUT, FRONT + docs.markdown(LEFT_OUT, code))


def test_pages_that_compute_are_left_out_only_where_they_say_so() -> None:
    tree = Tree(ROOT / "docs" / "source")
    pages = [tree.page(name, "en") for name in tree.names]
    left_out = {page.name for page in pages if page.executed and why_exempt(page, Device("pretend"))}
    others = {"basics/command_line_tool", "contributing/documentation", "features/fault_tolerance"}
    peers = ("accelerate", "deepspeed", "fsdp2", "lightning", "trainer")
    others |= {"tutorials/several_nodes", *(f"tutorials/coming_from_{peer}" for peer in peers)}
    assert left_out == {LEFT_OUT, *others}
    assert not any(why_exempt(page, Device(device)) for page in pages for device in ("", "cpu"))


@needs_compiler
def test_a_page_runs_on_the_pretend_device_and_an_exempt_one_is_left_out(docs) -> None:
    command = "torchrun --standalone --nproc_per_node=2 lesson.py"
    page = docs.markdown("lesson", MOVED, command).replace("\n\n<!-- doc", f"\n\n{SHOWN}\n\n<!-- doc")
    docs.write("lesson", page)
    add_left_out(docs, "raise ValueError('nobody runs me')")
    done = docs.run("--all", "--device", "pretend", "--lang", "en")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{LEFT_OUT}   exempt on pretend: its front matter names only cpu" in done.stdout
    assert "pretend pretend x2" in done.stdout
    assert "outputs 1/1" in done.stdout
    [record] = docs.records.read()
    assert (record["device"], record["page"], record["status"]) == ("pretend", "lesson", "PASS")


@needs_compiler
def test_what_a_gpu_refuses_fails_the_page(docs) -> None:
    docs.add("lesson", MOVED.replace("torch.ones(2, 4, device=get_current_device())", "torch.ones(2, 4)"))
    done = docs.run("lesson", "--device", "pretend", "--lang", "en")
    assert done.returncode == 1
    assert "Expected all tensors to be on the same device" in done.stdout


def test_an_exempt_page_runs_where_it_is_named_and_on_other_devices(docs) -> None:
    add_left_out(docs, "print('here')")
    for words in (["--all", "--device", "cpu"], [LEFT_OUT, "--device", "cpu"]):
        done = docs.run(*words, "--lang", "en")
        assert done.returncode == 0, done.stdout
        assert "exempt" not in done.stdout
        assert "1 passed" in done.stdout


def test_nothing_is_left_where_all_pages_are_exempt(docs, capsys) -> None:
    add_left_out(docs, "print('here')")
    assert docs.main("--all", "--device", "pretend", "--lang", "en") == cli.OK
    assert "0 passed, 0 failed" in capsys.readouterr().out


def test_the_device_itself_is_part_of_its_records(tmp_path) -> None:
    file = tmp_path / DEVICE_FILES["pretend"] / "device.h"
    file.parent.mkdir(parents=True)
    file.write_text("one")
    before = [common_inputs(tmp_path, device) for device in DEVICES]
    file.write_text("other one")
    after = [common_inputs(tmp_path, device) for device in DEVICES]
    assert [device for device, one, other in zip(DEVICES, before, after, strict=True) if one != other] == ["pretend"]
    assert (ROOT / DEVICE_FILES["pretend"]).is_dir()
