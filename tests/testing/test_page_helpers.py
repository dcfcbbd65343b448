"""What pages of the documentation share: expected errors, comparisons with one process, and counts."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossal._src.testing.asserts import _are_strays_few
from colossal.booster import Booster
from colossal.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossal.cluster import ParallelMesh
from colossal.errors import ColossalError, ConfigError, PlanError, UnsupportedError
from colossal.nn import Linear
from colossal.testing import (
    SavedTensorCounter,
    WorldError,
    assert_close,
    assert_equal_to_one_process,
    expect_error,
    run_processes,
    run_threads,
)


def raise_on_all_ranks() -> int:
    with expect_error(ConfigError, ForeignError) as errors:
        raise ConfigError("Found 3.")
    return len(errors)


def raise_on_rank_0() -> None:
    with expect_error(ColossalError):
        if torch.distributed.get_rank() == 0:
            raise PlanError("no plan")


class ForeignError(Exception):
    """An error of no library."""


def test_an_expected_error_is_printed_once(capfd) -> None:
    assert run_threads(raise_on_all_ranks, 2) == [1, 1]
    assert capfd.readouterr().out == "ConfigError: Found 3.\n"


def test_every_rank_must_raise() -> None:
    with pytest.raises(WorldError, match=r"Rank 1 .*[\s\S]*AssertionError: This must raise ColossalError\. Found that"):
        run_threads(raise_on_rank_0, 2)


def test_a_path_in_an_error_does_not_show_where_the_page_ran(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with expect_error(OSError):
        (tmp_path / "missing.pt").read_bytes()
    assert capsys.readouterr().out == "FileNotFoundError: [Errno 2] No such file or directory: 'missing.pt'\n"


def test_other_errors_pass_and_are_not_shown(capsys) -> None:
    with pytest.raises(ZeroDivisionError), expect_error(ColossalError, OSError):
        _ = 1 / 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("types", [(), (Exception,), (ValueError, AssertionError), (ExceptionGroup, Exception)])
def test_an_error_of_a_failing_check_cannot_be_expected(types) -> None:
    with pytest.raises(TypeError, match="none that a failing check raises"):
        expect_error(*types)


def test_numbers_are_compared_as_float32() -> None:
    assert_close([0.5, 0.25], [0.5, 0.250001])
    assert_close(0.5, 0.501, rtol=1e-2)
    for actual, limits in (([0.5, 0.2501], {}), ([0.5, 0.250001], {"rtol": 1e-9}), ([0.5], {})):
        with pytest.raises(AssertionError, match="losses: |length of the sequences"):
            assert_close(actual, [0.5, 0.25], "losses", **limits)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def load_initial(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 4
    return model


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


PLUGINS: dict[str, tuple[Callable[[], Plugin], bool]] = {
    "ddp": (TorchDDPPlugin, True),
    "fsdp": (TorchFSDPPlugin, True),
    "zero": (lambda: LowLevelZeroPlugin(precision="fp32"), False),
    "zero, gathering": (lambda: LowLevelZeroPlugin(precision="fp32", overlap_allgather=True), False),
    "gemini": (lambda: GeminiPlugin(precision="fp32"), False),
    "pipeline": (lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32"), True),
}


def train_as_one_process(name: str) -> list[str]:
    """Make a step of SGD, compare it, then compare with a changed reference; return what was found."""
    make_plugin, has_gradients = PLUGINS[name]
    (x, y), reference = make_batch(), load_initial(make_model())
    nn.functional.mse_loss(reference(x), y).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    model = load_initial(make_model())
    booster = Booster(plugin=make_plugin())
    model, optimizer, criterion, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    assert optimizer
    assert criterion
    batch: Any = iter([(x, y)])
    if name == "pipeline":
        booster.execute_pipeline(batch, model, lambda out, pair: criterion(out, pair[1]), optimizer)
    else:
        booster.backward(criterion(model(x), y), optimizer)
    optimizer.step()
    assert_equal_to_one_process(model, reference, gradients=has_gradients)
    assert not getattr(getattr(optimizer, "masters", None), "_gathers", {}), "it did not wait for all parameters"
    assert_equal_to_one_process(model, dict(reference.named_parameters()))
    messages = []
    changed = copy.deepcopy(reference)
    with torch.no_grad():
        changed[4].weight[3, 0] += 1e-3
    for other in (changed, reference[:3]):
        try:
            assert_equal_to_one_process(model, other)
        except AssertionError as error:
            messages.append(str(error).splitlines()[0])
    return messages


@pytest.mark.parametrize("name", PLUGINS)
def test_a_step_of_any_plugin_is_compared_with_one_process(name) -> None:
    by_rank = run_processes(train_as_one_process, 2, name)
    missing = "The ranks must hold the parameters that one process has. Found apart: ['4.bias', '4.weight']."
    assert all(messages[-1] == missing for messages in by_rank)
    different = [messages[0] for messages in by_rank if len(messages) == 2]
    assert set(different) == {"4.weight: Tensor-likes are not close!"}
    assert len(different) == (1 if name == "pipeline" else 2), "all ranks that hold the parameter compare it"


def compare_tensor_parallel(change: str) -> str:
    x, reference = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), load_initial(nn.Linear(8, 4))
    with ParallelMesh(tp=2):
        model = Linear.from_native(reference)
    for each in (model, reference):
        each(x).square().sum().backward()
    if change == "gradient":
        assert model.weight.grad is not None
        model.weight.grad[0, 0] += 1e-2
    elif change == "no gradient":
        model.bias.grad = None
    try:
        assert_equal_to_one_process(model, reference, gradients=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.mark.parametrize(
    ("change", "message"),
    {
        "nothing": "",
        "gradient": "gradient of weight: Tensor-likes are not close!",
        "no gradient": "Both models must have the same gradients. Found none of bias in the model.",
    }.items(),
)
def test_gradients_of_shards_are_compared(change, message) -> None:
    assert run_threads(compare_tensor_parallel, 2, change) == [message, message]


# ----------------------------------------------------------------------------------- after steps of Adam


LR, STEPS = 0.01, 3
MOVED = LR * STEPS


def train_by_adam(model: nn.Module, rows: slice) -> nn.Module:
    (x, y), optimizer = make_batch(), torch.optim.AdamW(model.parameters(), lr=LR)
    for _ in range(STEPS):
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("apart", "num_apart", "message"),
    [
        (0.0, 0, ""),
        (1.99, 1, ""),
        (0.7, 4, ""),
        (2.01, 1, "2.weight: Tensor-likes are not close!"),
        (float("nan"), 1, "2.weight: Tensor-likes are not close!"),
        (1.0, 4, "After a path of 0.03, parameters must be apart by at most 0.0003 on average."),
    ],
)
def test_after_a_path_few_elements_may_be_apart_by_twice_as_much(apart: float, num_apart: int, message: str) -> None:
    reference = train_by_adam(load_initial(make_model()), slice(None))
    model = copy.deepcopy(reference)
    with torch.no_grad():
        model[2].weight.view(-1)[:num_apart] += apart * MOVED
    if not message:
        assert_equal_to_one_process(model, reference, moved=MOVED)
        return
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}"):
        assert_equal_to_one_process(model, reference, moved=MOVED)


def train_plugin_by_adam(has_average: bool) -> str:
    """Train on the rows of this rank, and compare with one process that has all; return what was found."""
    reference = train_by_adam(load_initial(make_model()), slice(None))
    (x, y), model, rank = make_batch(), load_initial(make_model()), torch.distributed.get_rank()
    rows = slice(rank, None, 2)
    if has_average:
        booster = Booster(plugin=TorchDDPPlugin())
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=LR))
        assert optimizer
        for _ in range(STEPS):
            booster.backward(nn.functional.mse_loss(model(x[rows]), y[rows]), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    else:
        train_by_adam(model, rows)
    try:
        assert_equal_to_one_process(model, reference, moved=MOVED)
    except AssertionError as error:
        return str(error)
    return ""


def test_after_steps_of_adam_a_missing_average_is_found() -> None:
    assert run_threads(train_plugin_by_adam, 2, True) == ["", ""]
    for message in run_threads(train_plugin_by_adam, 2, False):
        assert "parameters must be apart by at most 0.0003 on average" in message


def test_saved_tensors_are_counted_once_and_without_parameters() -> None:
    last, x = nn.Linear(16, 2), torch.ones(8, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), last)
    with SavedTensorCounter(model) as saved:
        y = model(x).sum()
    activations = 4 * 8 * (4 + 16)  # the input, and the output of ReLU, which two layers need
    assert saved.bytes == activations
    with SavedTensorCounter() as everything:
        y = model(x).sum()
    assert everything.bytes == activations + last.weight.nbytes
    with SavedTensorCounter(model) as recomputed:
        y = checkpoint(model, x, use_reentrant=False).sum()
    assert recomputed.bytes == x.nbytes
    y.backward()


def count_in_chunks() -> None:
    model = nn.Linear(4, 2)
    boosted = Booster(device="cpu", plugin=GeminiPlugin(precision="fp32")).boost(model)[0]
    with pytest.raises(UnsupportedError, match="Count under LowLevelZeroPlugin"), SavedTensorCounter(boosted):
        boosted(torch.ones(8, 4))


def test_saved_tensors_of_parameters_in_chunks_are_refused() -> None:
    run_processes(count_in_chunks, 1)


def test_saved_tensors_on_the_meta_device_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to("meta")
    with SavedTensorCounter(model) as saved:
        model(torch.ones(8, 4, device="meta"))
    assert saved.bytes == 4 * 8 * (4 + 16)


def test_on_a_gpu_limits_are_wider_and_one_in_a_hundred_elements_may_be_a_step_away() -> None:
    expected = torch.zeros(200)
    limits = {"rtol": None, "atol": 1e-5}
    for strays, is_fine in ((2, True), (3, False)):
        found = expected + 9e-5
        found[:strays] = 0.1
        assert _are_strays_few(found, expected, **limits) is is_fine
    assert not _are_strays_few(expected + 1.1e-4, expected, **limits)
    assert not _are_strays_few(expected.index_fill(0, torch.tensor([0]), float("nan")), expected, **limits)
    assert not _are_strays_few(expected.double(), expected, **limits)
    assert not _are_strays_few(expected[:100], expected, **limits)
