# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false
"""Every optimizer does what its paper, or torch, says: serially, in half precision, from a state, and on shards."""

import copy

import pytest
import torch
from chosen import crossed
from optimizers import CASES, CUTTERS, STEPS, draw, grads_at, set_grads, start, to_shards

from colossal.cluster import ParallelMesh
from colossal.tensor import placement_of
from colossal.testing import run_threads


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in start()]


def take(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, grads_at(step), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


ALL = range(1, STEPS + 1)
TOLERANCES = {torch.float64: (1e-10, 1e-12), torch.float32: (1e-3, 1e-5), torch.bfloat16: (0.1, 0.1)}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, dtype) -> None:
    params = parameters(dtype)
    optimizer = CASES[name].build(params)
    take(optimizer, params, ALL)
    rtol, atol = TOLERANCES[dtype]
    for param, wanted, begun in zip(params, CASES[name].expected(), start(), strict=True):
        assert param.dtype == dtype
        torch.testing.assert_close(param.detach().double(), wanted, rtol=rtol, atol=atol)
        assert not torch.equal(param.detach().double(), begun) or dtype == torch.bfloat16
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    states = [value for state in optimizer.state.values() for value in state.items()]
    assert all(value.dtype == (torch.float32 if key == "step" else wanted) for key, value in states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_goes_on_from_a_state_as_if_nothing_had_been(name, dtype) -> None:
    through, params = parameters(dtype), parameters(dtype)
    take(CASES[name].build(through), through, ALL)
    before = CASES[name].build(params)
    take(before, params, range(1, 3))
    saved = copy.deepcopy(before.state_dict())
    after = CASES[name].build(params)
    after.load_state_dict(saved)
    take(after, params, range(3, STEPS + 1))
    for one, other in zip(params, through, strict=True):
        assert torch.equal(one, other)


def is_by_itself(name: str) -> bool:
    """Whether a parameter moves as it does whatever the others do, at a rate that a group decides."""
    return "FusedLAMB" not in name and name not in ("Adafactor", "Adafactor, warm-up")


@pytest.mark.parametrize("name", [*filter(is_by_itself, CASES)])
def test_groups_have_their_own_numbers(name) -> None:
    """A parameter in the second group moves as if that group's numbers were everybody's."""
    case = CASES[name]
    params, alone = parameters(torch.float64), parameters(torch.float64)
    other = {"lr": 0.02, "weight_decay": 0.4}
    optimizer = case.build(params[:2])
    optimizer.add_param_group({"params": params[2:], **case.group, **other})
    take(optimizer, params, ALL)
    single = case.kind([{"params": alone, **case.group}], **(case.options | other))
    take(single, alone, ALL)
    for one, same in zip(params[2:], alone[2:], strict=True):
        torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-14)
    wanted = case.expected()
    for one, same in zip(params[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one.detach(), same, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_a_closure_computes_gradients(name) -> None:
    params = parameters(torch.float64)
    optimizer = CASES[name].build(params)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        pairs = zip(params, grads_at(1), strict=True)
        loss = sum(((param * grad).sum() for param, grad in pairs), start=torch.zeros(()))
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    for param, wanted in zip(params, CASES[name].expected(1), strict=True):
        torch.testing.assert_close(param.detach(), wanted, rtol=1e-10, atol=1e-12)


def states_of_shards() -> list[tuple[dict[str, object], ...]]:
    mesh = ParallelMesh()
    (shard,) = to_shards([draw((5, 2), 0)], CUTTERS["even"], mesh)  # as many elements as there are rows
    optimizer = CASES["CAME"].build([shard])
    shard.grad = torch.ones_like(shard)
    optimizer.step()
    before = {name: placement_of(state).flat for name, state in optimizer.state[shard].items()}
    optimizer.load_state_dict(optimizer.state_dict())
    return [(before, {name: placement_of(state).flat for name, state in optimizer.state[shard].items()})]


def test_states_of_shards_know_what_they_are_ranges_of() -> None:
    for [(before, after)] in run_threads(states_of_shards, 2):
        assert before["exp_avg"] is not None
        assert {name for name, shard in before.items() if shard is not None} == {"exp_avg"}
        assert before == after


def on_shards(name: str, cut: str) -> list[torch.Tensor]:
    mesh = ParallelMesh()
    shards = to_shards(start(), CUTTERS[cut], mesh)
    optimizer = CASES[name].build(shards)
    for step in ALL:
        set_grads(shards, grads_at(step), CUTTERS[cut], mesh)
        optimizer.step()
    return [shard.detach() for shard in shards]


@pytest.mark.chosen
@pytest.mark.parametrize(
    ("name", "size_and_cut"), crossed(CASES, [(2, "even"), (3, "all on the last"), (4, "odd")], one_in=3)
)
def test_shards_move_as_the_whole(name, size_and_cut) -> None:
    size, cut = size_and_cut
    found = run_threads(on_shards, size, name, cut)
    for parts, wanted in zip(zip(*found, strict=True), CASES[name].expected(), strict=True):
        torch.testing.assert_close(torch.cat(parts).view(wanted.shape), wanted, rtol=1e-10, atol=1e-12)
