"""Products by panels equal those by rows, whatever vectors the processor has, and each row is its own."""

import pytest
import torch

from colossal._src.kernel import has_packed_product, packed_product, to_panels, to_rows

LEVELS = [0, 1, 2]
SHAPES = [(1, 32, 32), (3, 48, 64), (8, 33, 31), (13, 70, 96), (19, 5, 2100), (6, 32, 4096), (205, 40, 64), (0, 32, 32)]
"""Rows, outputs and inputs; more than 96 rows are divided, and more than 2,048 inputs."""

needs_vectors = pytest.mark.skipif(not has_packed_product(torch.float32), reason="no compiler, or no vectors")
needs_tiles = pytest.mark.skipif(not has_packed_product(torch.bfloat16), reason="no tiles for bfloat16")


def draw(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows, a weight and a bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, level: int) -> None:
    panels = to_panels(weight)
    found = packed_product(x, panels.data_ptr(), len(weight), bias, level)
    shift = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    exact = x.double() @ weight.double().T + shift
    assert (found.shape, found.dtype) == (exact.shape, x.dtype)
    # sums of as many terms in float32, and the result is rounded once more
    magnitude = x.double().abs() @ weight.double().abs().T + shift.abs()
    bound = (x.shape[1] + 2) * 2.0**-24 * magnitude + (2.0**-8 if x.dtype == torch.bfloat16 else 0) * exact.abs()
    assert ((found.double() - exact).abs() <= bound).all()


@needs_vectors
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_products_in_float32(level: int, shape: tuple[int, int, int], has_bias: bool) -> None:
    x, weight, bias = draw(*shape, torch.float32)
    check(x, weight, bias if has_bias else None, level)
    assert torch.equal(to_rows(to_panels(weight), len(weight)), weight)


@needs_tiles
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [each for each in SHAPES if each[2] % 32 == 0], ids=str)
def test_products_in_bfloat16(shape: tuple[int, int, int], has_bias: bool) -> None:
    x, weight, bias = draw(*shape, torch.bfloat16)
    check(x, weight, bias if has_bias else None, 2)


@needs_vectors
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_is_the_same_whatever_rows_are_beside_it(level: int) -> None:
    x, weight, bias = draw(15, 40, 2100, torch.float32)
    address = (panels := to_panels(weight)).data_ptr()
    together = packed_product(x, address, 40, bias, level)
    assert all(
        torch.equal(packed_product(x[first : first + number], address, 40, bias, level), together[first:][:number])
        for first, number in ((0, 1), (3, 2), (5, 4), (1, 7), (2, 8))
    )
    assert panels.isfinite().all()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=needs_vectors), pytest.param(torch.bfloat16, marks=needs_tiles)]
)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    x, weight, _ = draw(5, 33, 64, dtype)
    panels = to_panels(weight)
    clean = packed_product(x, panels.data_ptr(), 33)
    x[2, 7], x[4, 0] = float("inf"), float("nan")
    found = packed_product(x, panels.data_ptr(), 33)
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])
    assert not found[[2, 4]].isfinite().any()


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=needs_vectors), pytest.param(torch.bfloat16, marks=needs_tiles)]
)
def test_threads_share_the_panels(dtype: torch.dtype) -> None:
    x, weight, bias = draw(3, 1500, 768, dtype)
    panels, before, found = to_panels(weight), torch.get_num_threads(), list[torch.Tensor]()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(packed_product(x, panels.data_ptr(), len(weight), bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
