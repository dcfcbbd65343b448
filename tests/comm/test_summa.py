import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.errors import MeshError, ShapeError
from colossal.testing import assert_close, fake_world, run_processes

PRODUCTS = {"ab": comm.summa_ab, "abt": comm.summa_abt, "atb": comm.summa_atb}
SHAPES = {"ab": ("mk", "kn"), "abt": ("mk", "nk"), "atb": ("km", "kn")}
PANELLED = {"ab": "k", "abt": "n", "atb": "m"}
SERIAL = {"ab": lambda a, b: a @ b, "abt": lambda a, b: a @ b.mT, "atb": lambda a, b: a.mT @ b}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    """A block: for each dimension the number of parts, and which one; empty behind the last one of torch.chunk."""
    for dim, (size, index) in enumerate(places):
        chunks = tensor.chunk(size, dim)
        tensor = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
    return tensor.clone()


def check_product(kind: str, lengths: dict[str, int], q: int, depth: int | None) -> None:
    mesh = ParallelMesh(tp=q * q * (depth or 1), tp_mode="2.5d" if depth else "2d", tp_depth=depth)
    seed = 10 * (mesh.rank("depth") if depth else 0)
    here = (q, mesh.rank("row")), (q, mesh.rank("col"))
    wholes = [
        draw(*(lengths[name] for name in names), seed=seed + i).requires_grad_() for i, names in enumerate(SHAPES[kind])
    ]
    expected = SERIAL[kind](*wholes)
    weights = draw(*expected.shape, seed=seed + 2)
    blocks = [cut(whole.detach(), *here).requires_grad_() for whole in wholes]
    result = PRODUCTS[kind](*blocks, lengths[PANELLED[kind]], mesh)
    assert_close(result, cut(expected.detach(), *here))
    grads = torch.autograd.grad(expected, wholes, weights, create_graph=True)
    own = torch.autograd.grad(result, blocks, cut(weights, *here), create_graph=True)
    for grad, whole in zip(own, grads, strict=True):
        assert_close(grad, cut(whole.detach(), *here))
    second = torch.autograd.grad(grads[0].square().sum(), wholes[1])[0]
    own_second = torch.autograd.grad(own[0].square().sum(), blocks[1])[0]
    assert_close(own_second, cut(second, *here))


def check_all(q: int, depth: int | None) -> None:
    for kind in PRODUCTS:
        for lengths in ({"m": 6, "k": 12, "n": 18}, {"m": 5, "k": 7, "n": 10}, {"m": 1, "k": 4, "n": 3}):
            check_product(kind, lengths, q, depth)


@pytest.mark.parametrize(("q", "depth"), [(1, None), (2, None), (3, None), (2, 2)])
def test_products_and_gradients_equal_those_of_one_process(q, depth) -> None:
    run_processes(check_all, q * q * (depth or 1), q, depth)


# --------------------------------------------------------------------------------------------- what is sent, and held


@pytest.mark.parametrize("q", [2, 4])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 32, 64), (64, 16, 16), (4, 4, 4)])
def test_what_is_sent_is_what_the_formula_says(q, m, k, n) -> None:
    """2D, forward and backward: q panels of A and of B three times, one of them as the result."""
    with fake_world(q * q), ParallelMesh(tp=q * q, tp_mode="2d"), comm.CommCounter() as counter:
        a, b = (torch.zeros(rows // q, columns // q, requires_grad=True) for rows, columns in ((m, k), (k, n)))
        comm.summa_ab(a, b, k).sum().backward()
    share = (q - 1) / q
    a_bytes, b_bytes = 4 * m * k / q, 4 * k * n / q
    assert counter.bytes["broadcast", "col"] == 2 * share * a_bytes
    assert counter.bytes["reduce", "col"] == share * a_bytes
    assert counter.bytes["broadcast", "row"] == 2 * share * b_bytes
    assert counter.bytes["reduce", "row"] == share * b_bytes


class PeakBytes(TorchDispatchMode):
    """The most bytes of storages made inside that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in before | self._seen:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("q", [4, 8])
def test_there_are_two_panels_at_most_and_never_a_whole_operand(kind, q) -> None:
    with fake_world(q * q, rank=q + 1), ParallelMesh(tp=q * q, tp_mode="2d"):
        block = torch.zeros(32, 32)
        gc.collect()
        with PeakBytes() as peak:
            PRODUCTS[kind](block, block, 32 * q)
    panels = {"ab": 4 + 1, "abt": 2 + 3, "atb": 2 + 3}[kind]  # and the result, or products: one summed up, one in work
    assert peak.peak <= panels * block.nbytes


# -------------------------------------------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused() -> None:
    wrong = pytest.raises(ShapeError, match=r"has 3 and 3 of its elements. Found \(2, 2\) and \(3, 2\) for ab")
    with fake_world(4), ParallelMesh(tp=4, tp_mode="2d"), wrong:
        comm.summa_ab(torch.zeros(2, 2), torch.zeros(3, 2), 6)
    with fake_world(4), ParallelMesh(tp=4), pytest.raises(MeshError, match="2D or 2.5D grid of ranks"):
        comm.summa_ab(torch.zeros(2, 2), torch.zeros(2, 2), 2)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_follow_autocast_where_a_device_has_it(kind) -> None:
    with fake_world(1), ParallelMesh(tp=1, tp_mode="2d"), torch.autocast("cpu", torch.bfloat16):
        for device, dtype in (("cpu", torch.bfloat16), ("meta", torch.float32)):
            a, b = (torch.ones(2, 2, device=device, requires_grad=True) for _ in range(2))
            product = PRODUCTS[kind](a, b, 2)
            product.sum().backward()
            assert product.dtype == dtype
            assert a.grad is not None
            assert a.grad.dtype == torch.float32
