"""The step of Adam: equal to float64 and to torch, for every dtype, vector width and number of threads."""

import ctypes
import itertools
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal.errors import ShapeError, UnsupportedError
from colossal.kernel import AdamStep, AdamTensors, adam, adam_step
from colossal.kernel.adam import reference_adam_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 1024, 1500, 70_001)
LEVELS = (0, 1, 2)  # portable code, AVX2, AVX-512; a processor takes the widest that it has

needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler, and there is none here")


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    numel: int, param: torch.dtype, grad: torch.dtype, copy: torch.dtype | None = None, seed: int = 0
) -> AdamTensors:
    means = draw(numel, seed + 2) / 10, draw(numel, seed + 3).square() / 10 + 0.01 + 0.01
    copied = None if copy is None else torch.zeros(numel, dtype=copy)
    return AdamTensors(draw(numel, seed, param), draw(numel, seed + 1, grad), *means, copied)


def exact(tensors: AdamTensors, step: AdamStep) -> list[torch.Tensor]:
    """Parameter and means after a step in float64."""
    param, grad, first, second = (
        tensor.double() for tensor in (tensors.param, tensors.grad, tensors.exp_avg, tensors.exp_avg_sq)
    )
    grad = grad * step.grad_scale + (0.0 if step.is_decoupled else step.weight_decay) * param
    first = step.betas[0] * first + (1 - step.betas[0]) * grad
    second = step.betas[1] * second + (1 - step.betas[1]) * grad**2
    corrected = second.sqrt() / step.root_of_correction + step.eps
    kept = 1 - step.lr * step.weight_decay if step.is_decoupled else 1.0
    return [kept * param - step.step_size * first / corrected, first, second]


STEPS = (
    AdamStep(step=1, lr=0.1),
    AdamStep(step=7, lr=0.02, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.3, grad_scale=0.25),
    AdamStep(step=3, lr=0.02, weight_decay=0.3, is_decoupled=False, bias_correction=False),
)


def check(tensors: AdamTensors, expected: list[torch.Tensor]) -> None:
    """Means to float32's precision, parameters to half a step of their dtype, and the copy as the parameter rounds."""
    for own, wanted in zip((tensors.exp_avg, tensors.exp_avg_sq), expected[1:], strict=True):
        torch.testing.assert_close(own.double(), wanted, rtol=1e-6, atol=5e-7)  # summands of about 1 that cancel
    precision = torch.finfo(tensors.param.dtype).eps
    torch.testing.assert_close(tensors.param.double(), expected[0], rtol=precision, atol=1e-6)
    if tensors.copy is not None:
        precision = torch.finfo(tensors.copy.dtype).eps
        torch.testing.assert_close(tensors.copy.double(), expected[0], rtol=precision, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("param", "grad"), [*itertools.product(DTYPES, DTYPES)])
def test_equals_float64(param, grad, level) -> None:
    run = adam._implementation()
    assert run is not reference_adam_step
    for step, numel, copy in itertools.product(STEPS, SIZES, (None, *DTYPES)):
        tensors = make(numel, param, grad, copy)
        expected = exact(tensors, step)
        run([tensors], step, 2, level)
        check(tensors, expected)


@pytest.mark.parametrize(("param", "grad"), [*itertools.product(DTYPES, DTYPES)])
def test_the_reference_equals_float64(param, grad) -> None:
    for step, copy in itertools.product(STEPS, (None, *DTYPES)):
        tensors = make(1500, param, grad, copy)
        expected = exact(tensors, step)
        reference_adam_step([tensors], step)
        check(tensors, expected)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_many_tensors_in_one_call_equal_one_after_another(threads) -> None:
    """The threads divide all elements, wherever a tensor ends; each element is computed as it always is."""
    sizes = [0, 3, 40_000, 1, 0, 100_001, 2048, 33_333]
    together = [make(numel, torch.float32, torch.bfloat16, torch.bfloat16, seed=i) for i, numel in enumerate(sizes)]
    alone = [make(numel, torch.float32, torch.bfloat16, torch.bfloat16, seed=i) for i, numel in enumerate(sizes)]
    adam_step(together, STEPS[1], num_threads=threads)
    for one in alone:
        adam_step([one], STEPS[1], num_threads=1)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.param, other.param)
        assert one.copy is not None
        assert other.copy is not None
        assert torch.equal(one.copy, other.copy)


@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_equal_torch(decoupled) -> None:
    theirs = draw(5000, 0).requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=0.05, weight_decay=0.1)
    ours = [draw(5000, 0), torch.zeros(5000), torch.zeros(5000)]
    for number in range(1, 11):
        grad = draw(5000, number)
        theirs.grad = grad.clone()
        optimizer.step()
        step = AdamStep(number, lr=0.05, weight_decay=0.1, is_decoupled=decoupled)
        adam_step([AdamTensors(ours[0], grad, ours[1], ours[2])], step)
    torch.testing.assert_close(ours[0], theirs.detach(), rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_every_float16_and_bfloat16_number_is_widened_and_narrowed_as_torch_does(level) -> None:
    """With no gradient and no decay a parameter stays, so its copy shows how it is rounded."""
    run, still = adam._implementation(), AdamStep(step=1, lr=0.0)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 2**-25, 2**-24, 1e38, float("inf"), float("nan")])
    for low in (torch.float16, torch.bfloat16):
        every = patterns.view(low)
        noisy = every.float() * (1 + draw(2**16, 1) * 2**-9)
        for values in (every, noisy, edges):
            zeros = torch.zeros(values.numel())
            copy = torch.empty(values.numel(), dtype=low)
            run([AdamTensors(values.clone(), zeros, zeros.clone(), zeros.clone(), copy)], still, 1, level)
            torch.testing.assert_close(copy, values.to(low), rtol=0, atol=0, equal_nan=True)
        grads = AdamTensors(torch.zeros(2**16), every.clone(), torch.zeros(2**16), torch.zeros(2**16))
        run([grads], still, 1, level)
        torch.testing.assert_close(grads.exp_avg, every.float() * (1 - 0.9), rtol=1e-6, atol=0, equal_nan=True)


@needs_compiler
@settings(max_examples=50, deadline=None)
@given(before=st.integers(0, 40), numel=st.integers(0, 3000), dtype=st.sampled_from(DTYPES), threads=st.integers(1, 4))
def test_writes_nothing_beside_the_tensors(before: int, numel: int, dtype: torch.dtype, threads: int) -> None:
    room = [torch.full((4000,), 3.0, dtype=kind) for kind in (dtype, dtype, torch.float32, torch.float32, dtype)]
    adam_step([AdamTensors(*(tensor[before : before + numel] for tensor in room))], STEPS[1], threads)
    for tensor in room:
        assert (tensor[:before] == 3).all()
        assert (tensor[before + numel :] == 3).all()


def test_without_a_compiler_torch_does_it(monkeypatch) -> None:
    def refuse(_: str) -> ctypes.CDLL:
        raise UnsupportedError("no compiler")

    monkeypatch.setattr(adam, "library", refuse)
    adam._implementation.cache_clear()
    try:
        assert adam._implementation() is reference_adam_step
        tensors = make(100, torch.float32, torch.float32)
        expected = exact(tensors, STEPS[0])
        adam_step([tensors], STEPS[0])
        check(tensors, expected)
    finally:
        adam._implementation.cache_clear()


def test_what_does_not_fit_is_refused() -> None:
    good = torch.zeros(4)
    for bad, found in (
        (torch.zeros(3), r"\(3,\) in torch.float32"),
        (torch.zeros(4, dtype=torch.float64), "torch.float64"),
        (torch.zeros(8)[::2], "not contiguous"),
        (torch.zeros(4, device="meta"), "on meta"),
    ):
        with pytest.raises(ShapeError, match=f"The grad of a step of Adam .* {found}"):
            adam_step([AdamTensors(good, bad, good, good)], STEPS[0])
    with pytest.raises(ShapeError, match="The exp_avg of a step of Adam is .* in torch.float32. Found"):
        adam_step([AdamTensors(good, good, good.bfloat16(), good)], STEPS[0])
