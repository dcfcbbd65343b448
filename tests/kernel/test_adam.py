# pyright: reportCallIssue=false
"""The step of Adam on the CPU: equal to float64 and to torch, for every dtype, vector width and number of threads."""

import ctypes
import itertools
import shutil
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from colossal._src.kernel.adam import native, op, reference
from colossal._src.kernel.adam.reference import run_fused, run_reference
from colossal._src.kernel.adam.step import Columns
from colossal.errors import ShapeError, UnsupportedError
from colossal.kernel import AdamStep, AdamTensors, adam_step

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


def columns_of(*tensors: AdamTensors) -> Columns:
    copies = [one.copy for one in tensors if one.copy is not None]
    names = ("param", "grad", "exp_avg", "exp_avg_sq")
    return [*([getattr(one, name) for one in tensors] for name in names), copies]


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
@pytest.mark.parametrize(
    ("level", "param", "grad"),
    [
        pytest.param(level, param, grad, marks=() if level == 2 or param == grad else pytest.mark.slow)
        for level, param, grad in itertools.product(LEVELS, DTYPES, DTYPES)
    ],
)
def test_equals_float64(param, grad, level) -> None:
    run: Callable[..., None] = native.on_cpu()
    for step, numel, copy in itertools.product(STEPS, SIZES, (None, *DTYPES)):
        tensors = make(numel, param, grad, copy)
        expected = exact(tensors, step)
        run(columns_of(tensors), step, 2, level)
        check(tensors, expected)


@pytest.mark.parametrize("run", [run_reference, run_fused])
@pytest.mark.parametrize(("param", "grad"), [*itertools.product(DTYPES, DTYPES)])
def test_what_takes_its_place_equals_float64(param, grad, run) -> None:
    for step, copy in itertools.product(STEPS, (None, *DTYPES)):
        tensors = make(1500, param, grad, copy)
        expected, grad_before = exact(tensors, step), tensors.grad.clone()
        run(columns_of(tensors), step, 0)
        check(tensors, expected)
        assert torch.equal(tensors.grad, grad_before)


def test_torch_s_fused_update_takes_many_tensors_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(reference, "_TEMPORARY_ELEMENTS", 1000)
    many = [make(numel, torch.bfloat16, torch.bfloat16, seed=numel) for numel in (0, 600, 300, 1500, 200, 900)]
    expected = [exact(one, STEPS[1]) for one in many]
    assert [len(part) for part in reference._buckets(many)] == [3, 1, 1, 1]
    run_fused(columns_of(*many), STEPS[1], 0)
    for one, wanted in zip(many, expected, strict=True):
        check(one, wanted)


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
    run: Callable[..., None] = native.on_cpu()
    still = AdamStep(step=1, lr=0.0)
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    edges = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e-8, 2**-25, 2**-24, 1e38, float("inf"), float("nan")])
    for low in (torch.float16, torch.bfloat16):
        every = patterns.view(low)
        noisy = every.float() * (1 + draw(2**16, 1) * 2**-9)
        for values in (every, noisy, edges):
            zeros = torch.zeros(values.numel())
            copy = torch.empty(values.numel(), dtype=low)
            tensors = AdamTensors(values.clone(), zeros, zeros.clone(), zeros.clone(), copy)
            run(columns_of(tensors), still, 1, level)
            torch.testing.assert_close(copy, values.to(low), rtol=0, atol=0, equal_nan=True)
        grads = AdamTensors(torch.zeros(2**16), every.clone(), torch.zeros(2**16), torch.zeros(2**16))
        run(columns_of(grads), still, 1, level)
        torch.testing.assert_close(grads.exp_avg, every.float() * (1 - 0.9), rtol=1e-6, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_means_of_squares_of_every_size_have_a_root(level) -> None:
    sizes = [0.0, 1e-45, 1e-40, 1e-38, 1e-30, 9e-26, 1.1e-25, 1e-20, 1e-10, 1e10, 9e37, 1.1e38, 3e38, float("inf")]
    squares = torch.tensor(sizes).repeat_interleave(16)
    run: Callable[..., None] = native.on_cpu()
    for mixed in (squares, squares.flip(0)[5:], squares[torch.arange(squares.numel()) * 37 % squares.numel()]):
        tensors = AdamTensors(torch.ones_like(mixed), torch.zeros_like(mixed), mixed.sqrt(), mixed.clone())
        step = AdamStep(step=5, lr=0.25, eps=1e-12)
        expected = exact(tensors, step)
        run(columns_of(tensors), step, 1, level)
        finite = mixed.isfinite()  # an infinite mean over an infinite root is no number
        torch.testing.assert_close(tensors.param[finite].double(), expected[0][finite], rtol=1e-6, atol=1e-6)
        assert not tensors.param[~finite].isfinite().any()


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_an_infinite_root_stops_an_element(level) -> None:
    """Where the square of a finite gradient leaves the range, the parameter stays, as with torch."""
    tensors = AdamTensors(torch.ones(40), torch.full((40,), 1e25), torch.zeros(40), torch.zeros(40))
    run: Callable[..., None] = native.on_cpu()
    run(columns_of(tensors), AdamStep(step=1, lr=0.1), 1, level)
    assert tensors.exp_avg_sq.isinf().all()
    assert torch.equal(tensors.param, torch.ones(40))


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

    monkeypatch.setattr(native, "library", refuse)
    op.runner_of.cache_clear()
    try:
        assert op.runner_of("cpu") is op.runner_of("cuda") is run_fused
        assert op.runner_of("xpu") is run_reference
        tensors = make(100, torch.float32, torch.float32)
        expected = exact(tensors, STEPS[0])
        adam_step([tensors], STEPS[0])
        check(tensors, expected)
    finally:
        op.runner_of.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_keeps_own_code_from_running_is_said_once(device, monkeypatch, capsys) -> None:
    reason = "A step of Adam needs a device that runs its kernel. Found on cuda:0: no image. Update the driver."

    def refuse() -> None:
        raise UnsupportedError(reason)

    monkeypatch.setattr(native, f"on_{device}", refuse)
    op.runner_of.cache_clear()
    try:
        assert op.runner_of(device) is op.runner_of(device) is run_fused
    finally:
        op.runner_of.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        f"colossal WARNING: [rank 0] A step of Adam on {device!r} takes torch's own operations. {reason}"
    )


def test_gpus_of_amd_are_not_told_to_install_a_compiler_of_nvidia(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    op.runner_of.cache_clear()
    try:
        assert op.runner_of("cuda") is run_fused
    finally:
        op.runner_of.cache_clear()
    assert not capsys.readouterr().err


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
    with pytest.raises(ShapeError, match="as many copies or none. Found lists of 2, 2, 2, 2, 1"):
        call([good] * 2, [good] * 2, [good] * 2, [good] * 2, [good])


# ------------------------------------------------------------------------------------------ the operation of torch


NUMBERS = {"step": 2, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
NUMBERS |= {"is_decoupled": True, "bias_correction": True, "grad_scale": 0.5}


def call(*columns: list[torch.Tensor]) -> None:
    torch.ops.colossal.adam_step(*columns, **NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("copy", [None, torch.bfloat16])
def test_the_operation_does_what_it_declares(copy) -> None:
    tensors = [make(numel, torch.float32, torch.bfloat16, copy) for numel in (30, 7)]
    torch.library.opcheck(torch.ops.colossal.adam_step.default, tuple(columns_of(*tensors)), NUMBERS)


def test_fake_tensors_are_looked_at_and_not_computed() -> None:
    with FakeTensorMode() as mode:
        fakes = AdamTensors(*(torch.ones(5) for _ in range(4)))
        adam_step([fakes], STEPS[0])
        assert isinstance(fakes.param, FakeTensor)
        assert fakes.param.fake_mode is mode
        with pytest.raises(ShapeError, match="The grad of a step of Adam"):
            adam_step([AdamTensors(fakes.param, torch.ones(6), fakes.exp_avg, fakes.exp_avg_sq)], STEPS[0])
    meta = AdamTensors(*(torch.ones(5, device="meta") for _ in range(4)))
    adam_step([meta], STEPS[0])


@pytest.mark.slow
def test_a_compiled_program_takes_the_same_step() -> None:
    def program(weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, copy: torch.Tensor, number: int):  # noqa: ANN202
        grad = weight * 2
        adam_step([AdamTensors(weight, grad, exp_avg, exp_avg_sq, copy)], AdamStep(number, lr=0.1))
        return weight + copy

    torch.compiler.reset()
    compiled = torch.compile(program, backend="eager", fullgraph=True, dynamic=True)
    plain, other = ([draw(50, 0), torch.zeros(50), torch.zeros(50), torch.zeros(50).bfloat16()] for _ in range(2))
    for number in (3, 4, 5):
        assert torch.equal(compiled(*other, number), program(*plain, number))
        for one, same in zip(plain, other, strict=True):
            assert torch.equal(one, same)
    assert plain[3].any()
    torch.compiler.reset()


def test_autograd_knows_what_was_written() -> None:
    """A value that backward needs must not change unnoticed."""
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    tensors = AdamTensors(weight, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(3))
    adam_step([tensors], STEPS[0])
    versions = [getattr(tensors, name)._version for name in ("param", "grad", "exp_avg", "exp_avg_sq", "copy")]
    assert versions == [1, 0, 1, 1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_stepped() -> None:
    with torch.inference_mode():
        tensors = make(100, torch.float32, torch.float32)
        expected = exact(tensors, STEPS[1])
        adam_step([tensors], STEPS[1])
        check(tensors, expected)


def test_tensors_with_and_without_a_copy_go_together() -> None:
    together = [make(50, torch.float32, torch.float32, copy, seed=1) for copy in (None, torch.float16, None)]
    expected = exact(together[0], STEPS[1])
    adam_step(iter(together), STEPS[1])
    for one in together:
        check(one, expected)


def test_no_tensors_are_no_work() -> None:
    adam_step([], STEPS[0])
