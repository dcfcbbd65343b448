# pyright: reportArgumentType=false, reportCallIssue=false
"""What programs do with a model whose experts are sharded over ranks, besides training it."""

import logging
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, inputs_of
from float64 import KeepFloat64
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch import nn

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.comm import Channel, CommCounter
from colossal.errors import CheckpointError, CommunicationError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.logging import get_dist_logger
from colossal.testing import fake_world, run_processes


def strong(name: str = "mixtral") -> Any:
    """A model whose layers and experts all matter to what it says."""
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.dim() == 1 else 10)
    return model


def hybrid(**options: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"tp_size": 1, "pp_size": 1, "precision": "fp32"} | options)


def boost(plugin: Any, model: nn.Module) -> tuple[Booster, Any, Any]:
    booster = Booster(device="cpu", plugin=plugin)
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


# ------------------------------------------------------------------------------------------ generate

PROMPTS = [torch.arange(5, 9)[None], torch.arange(40, 47)[None]]
NUM_NEW = 8


def generate(model: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    with KeepFloat64():
        found = model.generate(prompt, do_sample=False, max_new_tokens=NUM_NEW, pad_token_id=0, **options)
    return found[0, prompt.shape[1] :].tolist()


def generate_sharded(name: str, options: dict[str, Any], eos: int) -> list[list[int]]:
    plugin = hybrid(**options)
    model = boost(plugin, strong(name))[1].unwrap().eval()
    prompt = PROMPTS[plugin.mesh.rank("dp")]
    beams = [generate(model, prompt, eos_token_id=eos, num_beams=2)]
    return [generate(model, prompt, eos_token_id=eos), *beams, [plugin.mesh.rank("dp")]]


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("mixtral", 2, {"ep_size": 2}),
        pytest.param("gpt-oss", 2, {"ep_size": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, {"tp_size": 2, "ep_size": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", 4, {"tp_size": 2, "ep_size": 4}, marks=pytest.mark.slow),
    ],
)
def test_ranks_generate_until_the_last_of_them_has_finished(name: str, size: int, options: dict[str, Any]) -> None:
    model = strong(name).eval()
    endless = [generate(model, prompt) for prompt in PROMPTS]
    eos = next(token for token in endless[0][1:] if token not in endless[1])
    expected = [
        [generate(model, prompt, eos_token_id=eos, **more) for more in ({}, {"num_beams": 2})] for prompt in PROMPTS
    ]
    assert len(expected[0][0]) < NUM_NEW == len(expected[1][0])
    for *found, (place,) in run_processes(generate_sharded, size, name, options, eos):
        assert found == expected[place]


@pytest.mark.parametrize(
    "options", [{"synced_gpus": False}, {"prefill_chunk_size": 2}, {"cache_implementation": "static"}]
)
def test_generation_of_unequal_numbers_of_passes_is_refused(options: dict[str, Any]) -> None:
    with fake_world(2):
        model = boost(hybrid(ep_size=2), strong())[1].unwrap()
        with pytest.raises(UnsupportedError, match=rf"Ranks that share experts.*Found {next(iter(options))}.*Leave it"):
            generate(model, PROMPTS[0], **options)


# ------------------------------------------------------------------------------------------ unequal numbers of batches


def evaluate(folder: Path, ends: str) -> str:
    """One rank of each pair has a batch less, and leaves, calls something else, or waits for what never comes."""
    with ParallelMesh(timeout_seconds=2 if ends == "waits" else 300):
        plugin = hybrid(ep_size=2)
        model = boost(plugin, build("mixtral"))[1].eval()
        rank, own = plugin.mesh.rank("ep"), plugin.mesh.global_rank
        dist.barrier()  # so that what took long is over
        try:
            for _ in range(2 - rank):
                with KeepFloat64(), torch.no_grad():
                    model(**inputs_of("mixtral"))
            if rank and ends == "reduces":
                Channel("ep", plugin.mesh).all_reduce(torch.ones(3))
        except CommunicationError as error:
            (folder / str(own)).touch()
            return str(error)
        while ends == "waits" and rank and not (folder / str(own - 1)).exists():
            time.sleep(0.01)
        return ""


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        (
            "leaves",
            r"Found that rank \d has left.* one rank has a batch more: give all ranks as many, by a Distributed",
        ),
        ("reduces", r"call the same collective .*Found that rank \d called all_to_all.* Look for a branch"),
        ("waits", r"within 2 s. Found that rank \d did not come. Look for what was done there instead"),
    ],
)
def test_a_rank_with_a_batch_more_does_not_hang(ends: str, message: str, tmp_path: Path) -> None:
    for rank, text in enumerate(run_processes(evaluate, 4, tmp_path, ends)):
        assert re.search(message, text) if rank % 2 == 0 or ends == "reduces" else not text, (rank, text)


# ------------------------------------------------------------------------------------------ traffic


def count_norms() -> dict[Any, int]:
    plugin = hybrid(ep_size=2)
    with plugin.mesh:
        booster, model, optimizer = boost(plugin, build("mixtral").float())
        booster.backward(model(**inputs_of("mixtral")).loss, optimizer)
        with CommCounter() as counter:
            optimizer.clip_grad_by_norm(1.0)
        return {axis: calls for (_, axis), calls in counter.calls.items()}


def test_norms_over_experts_are_counted() -> None:
    for calls in run_processes(count_norms, 4):
        assert calls == {"ep": 1}  # the other gradients are replicated


# ------------------------------------------------------------------------------------------ files that do not fit

STACKED = "model.layers.1.mlp.experts.gate_up_proj"
ONE_OF_HUB = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
NOT_FITTING = {
    "fewer experts": rf"1 with another shape: {STACKED} \(file \[2, 256, 64\], model \[4, 256, 64\]\)",
    "no parameter of experts": rf"1 missing from the file: {STACKED}\. ",
    "of the Hub": rf"{STACKED}.*unexpected in the file.*each expert by itself.* by from_pretrained before boost",
}


def load_not_fitting(folder: Path) -> dict[str, str]:
    booster, model, _ = boost(hybrid(ep_size=2), build("mixtral"))
    found: dict[str, str] = {}
    for name in NOT_FITTING:
        with pytest.raises(CheckpointError) as error:
            booster.load_model(model, folder / f"{name}.safetensors")
        found[name] = str(error.value)
    return found


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model: Any = build("mixtral")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state | {STACKED: state[STACKED][:2].clone()}, tmp_path / "fewer experts.safetensors")
    save_file(
        {name: state[name] for name in state if name != STACKED}, tmp_path / "no parameter of experts.safetensors"
    )
    model.save_pretrained(tmp_path)
    assert ONE_OF_HUB in load_file((tmp_path / "model.safetensors").rename(tmp_path / "of the Hub.safetensors"))
    for messages in run_processes(load_not_fitting, 2, tmp_path):
        for name, message in NOT_FITTING.items():
            assert re.search(message, messages[name]), messages[name]


# ------------------------------------------------------------------------------------------ files that do


class Messages(logging.Handler):
    """What the library logs about experts while it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if "experts from" in record.getMessage():
            self.texts.append(record.getMessage())


@contextmanager
def logged() -> Generator[list[str]]:
    messages, logger = Messages(), logging.getLogger(get_dist_logger().name)
    logger.addHandler(messages)
    try:
        yield messages.texts
    finally:
        logger.removeHandler(messages)


def load_and_log(name: str, options: dict[str, Any], path: Path) -> list[str]:
    booster, model, _ = boost(hybrid(**options), build(name))
    with logged() as texts:
        booster.load_model(model, path)
    return texts


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {"ep_size": 2}),
        ("mixtral", {"tp_size": 2}),
        ("gpt-oss", {"ep_size": 2}),
        ("llama", {"tp_size": 2}),
        ("mixtral", {"pp_size": 2, "num_microbatches": 2}),
    ],
)
def test_loading_says_once_how_many_experts_there_were(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({key: value.clone() for key, value in build(name).state_dict().items()}, path)
    expected = [] if name == "llama" else [f"[rank 0] loaded 8 of 8 experts from {path}"]
    assert run_processes(load_and_log, 2, name, options, path) == [expected, []]


def test_loading_says_how_many_of_the_experts_it_did_not_find(tmp_path: Path) -> None:
    model: Any = build("mixtral").float()
    path, folder = tmp_path / "some.safetensors", tmp_path / "hub"
    save_file({name: value.clone() for name, value in model.state_dict().items() if name != STACKED}, path)
    with logged() as texts:
        Booster(device="cpu").load_model(model, path, strict=False)
    model.save_pretrained(folder)
    with logged() as lazily, LazyInitContext():
        type(model).from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weights[name] for name in weights if "layers.1.block_sparse_moe.experts" not in name},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with logged() as without, LazyInitContext():
        type(model).from_pretrained(folder)
    assert texts == [f"[rank 0] loaded 4 of 8 experts from {path}"]
    assert [*lazily, *without] == [f"[rank 0] loaded {number} of 8 experts from {folder}" for number in (8, 4)]
