"""Programs for readers who come from other libraries: ours train, and the pages show them as they are.

What the other libraries do is compared by ``nox -s peers``, see ``tests/peers/run.py``.
"""

import json
import os
import re
import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import training_pairs
from ports import free_port
from recorded_texts import has_recorded_texts
from torch.distributed.device_mesh import init_device_mesh

import colossal
import colossal.nn.moe  # a table names it, and `colossal.nn` does not import it
from colossal import comm
from colossal.accelerator import get_current_device
from colossal.booster import Booster, plugin
from colossal.cluster import DistCoordinator
from colossal.interface import ModelWrapper, OptimizerWrapper
from colossal.lazy import LazyInitContext
from colossal.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossal.nn.optimizer import HybridAdam
from colossal.testing import make_finetuning_inputs, run_processes

pytestmark = pytest.mark.slow

RECORD = training_pairs.ROOT / "docs/measured/peers.md"
ROOTS = {
    **{name: getattr(plugin, name) for name in plugin.__all__},
    "Booster": Booster,
    "CosineAnnealingWarmupLR": CosineAnnealingWarmupLR,
    "Embedding2D": colossal.nn.Embedding2D,  # pyright: ignore[reportAttributeAccessIssue] (an older name)
    "HybridAdam": HybridAdam,
    "LazyInitContext": LazyInitContext,
    "booster": Booster,
    "colossal": colossal,
    "comm": comm,
    "coordinator": DistCoordinator,
    "criterion": torch.nn.Module,
    "get_current_device": get_current_device,
    "init_device_mesh": init_device_mesh,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
    "model": ModelWrapper,
    "optimizer": OptimizerWrapper,
    "plugin": plugin.Plugin,
    "split_input": colossal.nn.split_input,
    "torch": torch,
}
FOREIGN = {"MixedPrecisionPolicy", "get_cosine_schedule_with_warmup", "activation_checkpointing_enable", "compile"}
PAGES = ["coming_from", *(f"coming_from_{peer}" for peer in training_pairs.PEERS)]


def train(program: str, folder: str) -> str:
    """Run a program, and return what it prints."""
    os.chdir(folder)
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(program, run_name="__main__")
    return printed.getvalue()


def losses_of(printed: str) -> list[float]:
    return [float(number) for line in printed.splitlines() for number in re.findall(r"\d\.\d{6}", line)]


def losses_on(num_ranks: int, program: Path, folder: Path) -> list[float]:
    """Run a program on ranks of this machine, and return the losses and the accuracy that it prints."""
    place = {"RANK": "{rank}", "LOCAL_RANK": "{rank}", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": str(free_port()), "COLOSSAL_DEVICE": "cpu"}
    ranks = {"form": False, "environment": place, "timeout_seconds": 300}
    return losses_of(run_processes(train, num_ranks, str(program), str(folder), **ranks)[0])


@pytest.mark.parametrize("peer", training_pairs.PEERS)
def test_our_program_has_the_losses_of_the_record(peer: str, tmp_path: Path) -> None:
    is_recorded = True
    if peer == "trainer":
        make_finetuning_inputs(tmp_path / "inputs")
        is_recorded = has_recorded_texts(tmp_path / "inputs")  # else another Python's, as the next test compares
    found = losses_on(2, training_pairs.PROGRAMS / f"{peer}_after.py", tmp_path)
    recorded = re.findall(
        rf"^## {peer}\n.*?^ours: (.*?)$", RECORD.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    expected = json.loads(f"[{recorded[0].replace(' ', ', ')}]")
    assert len(found) == len(expected)
    if is_recorded:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert found[-2] < found[0] - 0.5


def test_the_program_for_users_of_the_trainer_is_one_process_with_any_texts(tmp_path: Path) -> None:
    make_finetuning_inputs(tmp_path / "inputs")
    program = training_pairs.PROGRAMS / "trainer_after.py"
    source = program.read_text(encoding="utf-8")
    assert source.count("_set, 8,") == 2
    (tmp_path / "alone.py").write_text(source.replace("_set, 8,", "_set, 16,"), encoding="utf-8")
    found, expected = losses_on(2, program, tmp_path), losses_on(1, tmp_path / "alone.py", tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("language", training_pairs.LANGUAGES)
@pytest.mark.parametrize("peer", training_pairs.PEERS)
def test_pages_show_the_programs(peer: str, language: str) -> None:
    shown = training_pairs.shown(training_pairs.page_of(peer, language).read_text(encoding="utf-8"))
    expected = training_pairs.blocks(peer)
    assert shown["diff"] == [expected["diff"]], "python tests/helpers/training_pairs.py writes it"
    assert shown["program"] == [expected["program"]]
    assert shown["other"] in ([], [expected["other"]])


@pytest.mark.parametrize("language", training_pairs.LANGUAGES)
@pytest.mark.parametrize("page", PAGES)
def test_what_tables_name_of_ours_exists(page: str, language: str) -> None:
    text = (training_pairs.ROOT / f"docs/source/{language}/tutorials/{page}.md").read_text(encoding="utf-8")
    calls = list(training_pairs.calls_in_column(text, 1))
    assert len(calls) > 4
    unknown = {call: training_pairs.unknown_names(call, ROOTS) for call in calls}
    assert not {
        call: names for call, names in unknown.items() if names and not any(word in names[0] for word in FOREIGN)
    }


def test_unknown_names_are_found() -> None:
    assert training_pairs.unknown_names("booster.boots(model)", ROOTS) == ["booster.boots"]
    assert training_pairs.unknown_names("Booster(max_nrom=1.0)", ROOTS) == ["Booster(max_nrom=)"]
    assert training_pairs.unknown_names("booster.save('dir', model, keep=2, stop=3)", ROOTS) == ["booster.save(stop=)"]
    assert not training_pairs.unknown_names("booster.save('dir', model, keep=2)", ROOTS)
