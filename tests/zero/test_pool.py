"""Buffers that are lent out and come back."""

import pytest
import torch

from colossal._src.zero import BufferPool

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_lent_again() -> None:
    pool = BufferPool()
    first = pool.take(8, torch.float32, CPU)
    assert pool.take(8, torch.float32, CPU).data_ptr() != first.data_ptr()
    pool.give_back(first)
    again = pool.take(6, torch.float32, CPU)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (6,)


def test_a_buffer_of_another_dtype_is_another() -> None:
    pool = BufferPool()
    first = pool.take(8, torch.float32, CPU)
    pool.give_back(first)
    assert pool.take(8, torch.bfloat16, CPU).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("sizes", [(5, 9, 7), (9, 5, 7), (7, 5, 9), (1 << 20, 1, 1 << 21)])
def test_what_is_expected_fits_into_the_first_buffer(sizes: tuple[int, ...]) -> None:
    """So that no step needs a second one, whichever bucket comes first."""
    pool, places = BufferPool(), set()
    for size in sizes:
        pool.expect(size)
    for size in sizes:
        buffer = pool.take(size, torch.float32, CPU)
        assert buffer.shape == (size,)
        places.add(buffer.data_ptr())
        pool.give_back(buffer)
    assert len(places) == 1
