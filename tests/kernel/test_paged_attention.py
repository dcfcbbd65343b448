"""Attention to keys and values in pages equals that of torch to gathered ones."""

import pytest
import torch
from torch.nn import functional

from colossal._src.kernel import PagedTokens, has_paged_attention, paged_attention

NUM_SLOTS, ENDS = 64, (1, 23, 7, 40)


def pages_of(dtype: torch.dtype, kv_heads: int, width: int, value_width: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(NUM_SLOTS, kv_heads, each, generator=draw).to(dtype) * 2 for each in (width, value_width)
    )
    slots = torch.stack([torch.randperm(NUM_SLOTS, generator=draw) for _ in range(6)])
    return keys, values, slots


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    # bfloat16 is read exactly and computed in float32, so only the result is rounded: to 8 bits, by at most 2**-8 of it
    [(torch.float32, 2e-6, 1e-5), (torch.float64, 1e-14, 5e-14), (torch.bfloat16, 2**-8, 1e-5)],
)
@pytest.mark.parametrize("sizes", [(4, 2, 64, 64), (3, 3, 20, 12), (8, 1, 80, 128)], ids=str)
def test_equals_gathered_keys(dtype: torch.dtype, rtol: float, atol: float, level: int, sizes: tuple[int, ...]) -> None:
    assert has_paged_attention(torch.device("cpu"))
    heads, kv_heads, width, value_width = sizes
    keys, values, slots = pages_of(dtype, kv_heads, width, value_width)
    sequences, ends = torch.tensor([4, 0, 5, 2]), torch.tensor(ENDS)
    query = torch.randn(4, heads, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    for window in (None, 5):
        tokens = PagedTokens(slots, sequences, ends)
        found = paged_attention(query, keys, values, tokens, scale=0.3, window=window, level=level)
        for row, (sequence, end) in enumerate(zip(sequences, ENDS, strict=True)):
            used = slots[sequence, max(0, end - (window or end)) : end]
            key, value = (each[used].double().movedim(0, 1).unsqueeze(0) for each in (keys, values))
            own = query[row].double()[None, :, None]
            expected = functional.scaled_dot_product_attention(own, key, value, scale=0.3, enable_gqa=True)
            torch.testing.assert_close(found[row].double(), expected[0, :, 0], rtol=rtol, atol=atol)


def test_threads_share_the_work() -> None:
    keys, values, _ = pages_of(torch.float32, 8, 128, 128)
    slots = torch.arange(NUM_SLOTS).repeat(64, 4)  # enough products for several threads
    tokens = PagedTokens(slots, torch.arange(64), torch.full((64,), 4 * NUM_SLOTS))
    query = torch.randn(64, 8, 128, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(paged_attention(query, keys, values, tokens, scale=0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, level: int) -> None:
    keys, values, slots = pages_of(dtype, 2, 20, 36)
    query = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    tokens = PagedTokens(slots[:1].expand(3, -1).contiguous(), torch.tensor([0, 1, 2]), torch.tensor([21, 19, 20]))
    clean = paged_attention(query, keys, values, tokens, scale=0.3, level=level)
    keys[slots[0, 20]] = torch.nan  # of the first row only
    values[slots[0, 21:]] = torch.inf  # of none
    query[2, 3] = torch.nan
    found = paged_attention(query, keys, values, tokens, scale=0.3, level=level)
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])
    assert torch.equal(found[2, :3], clean[2, :3])
    assert found[2, 3].isnan().all()
