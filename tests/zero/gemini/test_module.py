# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Any model trains in chunks as in one process: nothing is assumed of how it uses its parameters."""

import copy
from typing import Any

import pytest
import torch
from chosen import crossed
from chunked import (
    BATCHES,
    EXACT,
    ROWS,
    WIDTH,
    Branches,
    Deep,
    Outcome,
    assert_equal,
    draw,
    loss_of,
    model_of,
    own_rows,
    train_alone,
    train_chunked,
    wrap,
)
from torch import distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from colossal.errors import ConfigError, UnsupportedError
from colossal.lazy import LazyInitContext
from colossal.testing import fake_world, run_threads
from colossal.zero.gemini import GeminiDDP, get_static_torch_model

AUTO = {"placement_policy": "auto", "device_budget": 1_000_000, "warmup_non_model_data_ratio": 0.9999}
"""The first pass has room for 100 bytes, so that each chunk goes as soon as another one comes."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "ahead, from the host": {"max_prefetch": 2, "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
    "auto": AUTO,
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Adam would blow up the rounding of a gradient that is 0 in truth, such as of a bias of attention keys."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Attention(nn.Module):
    """Reads `out_proj.weight` without calling that module."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, 3, WIDTH)
        return self.layer(tokens + self.attend(tokens, tokens, tokens)[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x.view(-1, 3, WIDTH))


class Elsewhere(nn.Module):
    """Uses the parameters of another module, as functions, as values, and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.factor = nn.Parameter(torch.tensor(0.7))
        self.list = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.dict = nn.ParameterDict({"a": torch.randn(WIDTH, 4), "b": torch.randn(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(nn.functional.linear(x, self.owner.weight.t() @ self.other.weight, self.owner.bias * 2))
        x = x * torch.sigmoid(self.factor) + self.other.weight[0] - torch.stack(list(self.list)).sum(0)
        y = torch.addmm(self.dict["b"], x, self.dict["a"])
        return (
            torch.einsum("bi,ji->bj", x, self.other.weight)
            + torch.cat([y, y[:, :2]], 1) / (1 + self.owner.weight**2).sum()
        )


class Square(torch.autograd.Function):
    """Saves a weight, and another one on its context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(Square.apply(x, layer.weight) + layer.bias)
        return x


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x.view(-1, 4, WIDTH))[0])


class Convolution(nn.Module):
    """With the running means of batch normalisation, which are not of all rows here but of the first rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 2)
        self.norm = nn.GroupNorm(2, 4)
        self.back = nn.ConvTranspose1d(4, 2, 2)
        self.slope = nn.PReLU(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope(self.back(self.norm(self.conv(x.view(-1, 2, 3)))))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.bag = nn.EmbeddingBag(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x * 3).long().abs() % 11
        return self.head(torch.tanh(self.table(words)).mean(1) + self.bag(words)) + x.mean(1, keepdim=True)


class Recomputed(nn.Module):
    """Repeats operations in the backward pass; a part of it is frozen."""

    def __init__(self, use_reentrant: bool, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)
        )
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers.requires_grad_(not frozen)
        self._use_reentrant = use_reentrant

    def _block(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers[number](x) + self.adapters[number](x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in range(3):
            x = checkpoint(self._block, number, x, use_reentrant=self._use_reentrant)
        return x


class Nested(Recomputed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, self.first(x), use_reentrant=self._use_reentrant)


def weight_norm() -> nn.Module:
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, 5))
    return nn.Sequential(layer, nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 4))


def frozen_first() -> nn.Module:
    model = Deep()
    model.enter.requires_grad_(False)
    model.layers[2].requires_grad_(False)
    model.layers[4].weight.requires_grad_(False)
    return model


MODELS = {
    "branches": Branches,
    "attention": Attention,
    "transformer": Encoder,
    "elsewhere": Elsewhere,
    "custom function": Custom,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "convolution": Convolution,
    "words": Words,
    "weight norm": weight_norm,
    "frozen parts": frozen_first,
    "recomputed": lambda: Recomputed(False, False),
    "recomputed, reentrant": lambda: Recomputed(True, False),
    "recomputed, frozen": lambda: Recomputed(False, True),
    "recomputed, reentrant, frozen": lambda: Recomputed(True, True),
    "recomputed twice": lambda: Nested(False, False),
}


@pytest.mark.chosen
@pytest.mark.parametrize(("name", "placement"), crossed(MODELS, PLACEMENTS, one_in=2))
def test_any_model(name: str, placement: str) -> None:
    model = model_of(MODELS[name])
    expected = train_alone(model, make=sgd)
    assert expected["losses"][-1] != expected["losses"][0]
    for size in (1, 2):
        ranks = run_threads(train_chunked, size, model, make=sgd, accumulate=3 - size, **PLACEMENTS[placement])
        assert_equal(ranks, expected)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.enter(x)))


def test_running_means() -> None:
    model = model_of(Mean)
    expected = train_alone(model)
    (alone,) = run_threads(train_chunked, 1, model)
    assert_equal([alone], expected)
    assert expected["state"]["norm.num_batches_tracked"] == 3
    half = [batch.chunk(2)[0].repeat(2, 1) for batch in BATCHES]  # on which both ranks find the same means
    state = train_alone(model, [batch[: ROWS // 2] for batch in half])["state"]
    for rank in run_threads(train_chunked, 2, model, half):
        for name, value in state.items():
            torch.testing.assert_close(rank["state"][name], value, **EXACT, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_next_to_running_means_are_in_chunks_of_float32(dtype: torch.dtype) -> None:
    model = model_of(Mean).float()
    expected = train_alone(model, [batch.float() for batch in BATCHES], make=sgd)
    (rank,) = run_threads(half_precision_means, 1, model, dtype)
    own = {"norm.weight": torch.float32, "norm.bias": torch.float32, "norm.running_mean": torch.float32}
    assert {name: rank["dtypes"][name] for name in own} == own
    assert {value for name, value in rank["dtypes"].items() if not name.startswith("norm.")} == {dtype}
    for name in own:
        torch.testing.assert_close(rank["state"][name], expected["state"][name], rtol=0.02, atol=0.02, msg=name)


def half_precision_means(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    wrapped, optimizer = wrap(model, sgd, mixed_precision=dtype, initial_scale=2.0**5)
    for batch in BATCHES:
        optimizer.zero_grad()
        optimizer.backward(loss_of(wrapped, batch.float()))
        optimizer.step()
    inner = wrapped.unwrap()
    dtypes = {name: value.dtype for name, value in [*inner.named_parameters(), *inner.named_buffers()]}
    return {"dtypes": dtypes, "state": wrapped.state_dict(only_rank_0=False)}


# ------------------------------------------------------------------------------------------------- unusual steps


def by_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Two forward passes before one backward pass."""
    return loss_of(model, rows) + (model(rows.flip(1)) * model(rows)).mean()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_several_forward_passes_before_a_backward_pass(placement: str) -> None:
    model = model_of(Branches)
    ranks = run_threads(train_chunked, 2, model, loss=by_loss, **PLACEMENTS[placement])
    assert_equal(ranks, train_alone(model, loss=by_loss))


def plain_backward(model: nn.Module, _optimizer: Any, rows: torch.Tensor) -> None:
    loss_of(model, rows).backward()


def twice(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    loss = loss_of(model, rows)
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss * 0.5)


def look_between(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    """Evaluate before, between and after the passes."""
    for part in rows.chunk(2):
        model.eval()
        with torch.no_grad():
            model(rows)
        with torch.inference_mode():
            model(rows)
        model.train()
        loss = loss_of(model, part) / 2
        with torch.no_grad():
            model(rows)
        optimizer.backward(loss)
        with torch.no_grad():
            model(rows)


def wasted_forward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    """A forward pass that no backward pass follows."""
    model(rows)
    optimizer.backward(loss_of(model, rows))
    kept = model(rows)
    del kept


def stepwise(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    output = model(rows)
    optimizer.backward_by_grad(output, 2 * output.detach() / output.numel())


def failed_forward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    inner = getattr(model, "module", model)

    def fail(*_args: Any) -> None:
        raise ValueError("on purpose")

    for hook in (inner.twice[2].register_forward_pre_hook, inner.norm.register_forward_hook):
        handle = hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(rows)
        handle.remove()
        optimizer.zero_grad()
    optimizer.backward(loss_of(model, rows))


def failed_backward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    for name in ("norm", "embed"):
        inner = getattr(model, "module", model).get_submodule(name)
        handle = inner.register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
        loss = loss_of(model, rows)
        with pytest.raises(ValueError, match="on purpose"):
            optimizer.backward(loss)
        handle.remove()
        optimizer.zero_grad()
        del loss
    optimizer.backward(loss_of(model, rows))


def failed_plain_backward(model: nn.Module, optimizer: Any, rows: torch.Tensor) -> None:
    loss = loss_of(model, rows)
    loss.register_hook(lambda grad: grad)
    inner = getattr(model, "module", model)

    def fail(_grad: torch.Tensor) -> None:
        raise ValueError("on purpose")

    handle = inner.embed.register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model, rows).backward()
    handle.remove()
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, rows))


STEPS = {
    "plain backward": (plain_backward, 1.0),
    "twice through one graph": (twice, 1.5),
    "evaluation between passes": (look_between, 1.0),
    "forward passes for nothing": (wasted_forward, 1.0),
    "backward from a gradient": (stepwise, 1.0),
    "after failed forward passes": (failed_forward, 1.0),
    "after failed backward passes": (failed_backward, 1.0),
    "after a failed plain backward pass": (failed_plain_backward, 1.0),
}


def train_by(step: Any, model: nn.Module, **options: Any) -> dict[str, Any]:
    wrapped, optimizer = wrap(model, sgd, **options)
    for batch in BATCHES:
        step(wrapped, optimizer, own_rows(batch))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.chosen
@pytest.mark.parametrize(("name", "placement"), crossed(STEPS, PLACEMENTS, one_in=2))
def test_unusual_steps(name: str, placement: str) -> None:
    step, factor = STEPS[name]
    model = model_of(Branches)
    expected = train_alone(model, make=sgd, loss=lambda m, rows: loss_of(m, rows) * factor)["state"]
    for size in (1, 2):
        for state in run_threads(train_by, size, step, model, **PLACEMENTS[placement]):
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, **EXACT, msg=lambda text, n=key: f"{n}: {text}")


# ------------------------------------------------------------------------------------------------- state at rest


def states(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    wrapped, _ = wrap(model, None, **options)
    named = wrapped.state_dict(prefix="module.", only_rank_0=False)
    found = wrapped.state_dict(only_rank_0=False)
    assert list(named) == [f"module.{name}" for name in found]
    return [found, wrapped.state_dict()]


def states_by_size(model: nn.Module, mebibytes: float, only_rank_0: bool) -> list[tuple[dict[str, Any], int]]:
    wrapped, _ = wrap(model, None)
    return list(wrapped.state_dict_shard(max_shard_size=mebibytes, only_rank_0=only_rank_0))


@pytest.mark.parametrize("only_rank_0", [False, True])
def test_the_state_comes_some_of_it_at_a_time(only_rank_0: bool) -> None:
    model = model_of(Branches)
    expected = dict(model.state_dict())
    total = sum(value.nbytes for value in expected.values())
    limit = max(total // 3, *(value.nbytes for value in expected.values()))
    first, second = run_threads(states_by_size, 2, model, limit / 2**20, only_rank_0)
    assert len(first) == len(second) > 1
    for found in (first, second):
        assert all(0 < size <= limit for _, size in found)
        assert sum(size for _, size in found) == total
    assert any(shard for shard, _ in second) is not only_rank_0
    for found in (first, *([] if only_rank_0 else [second])):
        assert [sum(value.nbytes for value in shard.values()) for shard, _ in found] == [size for _, size in found]
        state = {name: value for shard, _ in found for name, value in shard.items()}
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_state_is_that_of_the_model(placement: str) -> None:
    model = model_of(Branches)
    expected = model.state_dict()
    for rank, (everywhere, first) in enumerate(run_threads(states, 3, model, **PLACEMENTS[placement])):
        assert list(everywhere) == list(expected)
        assert all(torch.equal(everywhere[name], value) for name, value in expected.items())
        assert list(first) == ([] if rank else list(expected))


def load(model: nn.Module, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    wrapped, optimizer = wrap(model, sgd, **options)
    plain_backward(wrapped, optimizer, own_rows(draw(8, ROWS, WIDTH)))
    optimizer.zero_grad()
    found = wrapped.load_state_dict(state)
    assert not found.missing_keys
    assert not found.unexpected_keys
    for batch in BATCHES:
        optimizer.backward(loss_of(wrapped, own_rows(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return wrapped.state_dict(only_rank_0=False)


@pytest.mark.parametrize("placement", [*PLACEMENTS, "strict"])
def test_what_is_loaded_is_trained_on(placement: str) -> None:
    options: dict[str, Any] = PLACEMENTS.get(placement, {"strict_ddp_mode": True})
    trained = train_alone(model_of(Branches), [draw(7, ROWS, WIDTH)], make=sgd)["state"]
    model = model_of(Branches)
    model.load_state_dict(trained)
    expected = train_alone(model, make=sgd)["state"]
    for state in run_threads(load, 2, model_of(Branches), trained, **options):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, **EXACT, msg=name)


def test_what_does_not_fit_is_not_loaded() -> None:
    with fake_world(1):
        model, _ = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), None)
        before = model.state_dict()
        state = {"0.weight": torch.zeros(3, 2), "0.bias": torch.zeros(2), "else": torch.zeros(1)}
        with pytest.raises(RuntimeError, match=r"missing: \['1.weight', '1.bias'\], unexpected: \['else'\].*0.weight"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="0.weight"):
            model.load_state_dict(state, strict=False)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with pytest.raises(UnsupportedError, match="assign=True"):
            model.load_state_dict(before, assign=True)
        found = model.load_state_dict({"0.bias": torch.ones(2)}, strict=False)
        assert found.missing_keys == ["0.weight", "1.weight", "1.bias"]
        assert model.state_dict()["0.bias"].tolist() == [1, 1]


def plain_copies(model: nn.Module, dtype: torch.dtype) -> list[nn.Module | None]:
    wrapped, _ = wrap(model, None, mixed_precision=dtype)
    return [get_static_torch_model(wrapped, only_rank_0=only) for only in (True, False)]


def test_a_plain_model_comes_out_again() -> None:
    model = model_of(Branches).float()
    for rank, (first, own) in enumerate(run_threads(plain_copies, 2, model, torch.bfloat16)):
        assert (first is None) == bool(rank)
        assert own is not None
        assert own.tied.weight is own.same.weight
        assert [type(each) for each in own.parameters()] == [nn.Parameter] * 14
        assert [each.requires_grad for each in own.parameters()] == [each.requires_grad for each in model.parameters()]
        for name, value in model.state_dict().items():
            assert torch.equal(own.state_dict()[name], value.bfloat16().float()), name
        loss_of(own, BATCHES[0].float()).backward()
        assert own.embed.weight.grad is not None


# ------------------------------------------------------------------------------------------------- the start


def start_apart(models: list[nn.Module]) -> Outcome:
    return train_chunked(models[dist.get_rank()])


def test_all_ranks_start_from_the_first() -> None:
    first, second = model_of(Branches), model_of(Branches)
    for parameter in second.parameters():
        nn.init.constant_(parameter, 7.0)
    assert_equal(run_threads(start_apart, 2, [first, second]), train_alone(first))


def build_lazily(seed: int, lazily: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    if lazily:
        with LazyInitContext():
            model = Branches()
    else:
        model = Branches()
    wrapped = GeminiDDP(model, mixed_precision=None, chunk_config_dict={1: {"chunk_size": 60}})
    return wrapped.state_dict()


def test_a_model_that_is_built_lazily() -> None:
    with fake_world(1):
        eager, lazy = build_lazily(3, False), build_lazily(3, True)
    assert all(torch.equal(eager[name], value) for name, value in lazy.items())


def test_parameters_stay_the_objects_that_they_are() -> None:
    with fake_world(2):
        linear = nn.Linear(4, 4)
        weight = linear.weight
        model = GeminiDDP(linear, mixed_precision=torch.bfloat16)
        assert model.module.weight is weight
        assert (weight.shape, weight.dtype, weight.numel(), weight.dim()) == ((4, 4), torch.bfloat16, 16, 2)
        assert weight.is_leaf
        assert weight.requires_grad
        assert isinstance(weight, nn.Parameter)
        assert "whose values are in a chunk" in repr(weight)
        assert hash(weight) == hash(weight)
        assert dict.fromkeys([weight]) == {weight: None}


def test_reading_outside_of_passes_is_refused() -> None:
    with fake_world(2):
        model, _ = wrap(nn.Linear(4, 4).double(), None)
        weight = model.module.weight
        for read in (
            lambda: weight + 1,
            weight.sum,
            lambda: weight.data,
            weight.detach,
            lambda: weight[0],
            weight.tolist,
            lambda: torch.allclose(weight, weight),
            lambda: model.module(torch.ones(1, 4).double()),
            lambda: nn.init.ones_(weight),
            lambda: copy.deepcopy(model.module),
        ):
            with pytest.raises(UnsupportedError, match="Between passes the values of a parameter are sharded"):
                read()


def test_what_chunks_can_not_hold() -> None:
    with fake_world(2):
        model, _ = wrap(nn.Linear(4, 4), None)
        with pytest.raises(ConfigError, match=r"weight is in one already. Wrap or boost it once"):
            GeminiDDP(model.module)
        with pytest.raises(UnsupportedError, match=r"sparse=True in 0.*sparse=False"):
            GeminiDDP(nn.Sequential(nn.Embedding(3, 3, sparse=True)))
        with pytest.raises(ConfigError, match=r"weight: Parameter in torch.float32 on meta.*LazyInitContext"):
            GeminiDDP(nn.Linear(2, 2, device="meta"))
        integers = nn.Module()
        integers.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
        with pytest.raises(ConfigError, match=r"count: Parameter in torch.int64"):
            GeminiDDP(integers)
        with pytest.raises(UnsupportedError, match=r"use_fp8=True.*mixed_precision=torch.bfloat16"):
            GeminiDDP(nn.Linear(2, 2), use_fp8=True)
        with pytest.raises(ConfigError, match=r"chunk_init_device='cuda'.*offload_param_frac=1.0"):
            GeminiDDP(nn.Linear(2, 2), chunk_init_device="cuda")
        with pytest.raises(ConfigError, match=r"Found device='cuda:0' for a rank on cpu. Leave it out"):
            GeminiDDP(nn.Linear(2, 2), device="cuda:0")
        with pytest.raises(ConfigError, match=r"for 2 ranks. Add an entry"):
            GeminiDDP(nn.Linear(2, 2), chunk_config_dict={4: {"chunk_size": 8}})
        with pytest.raises(ConfigError, match=r"for 2 ranks. Add an entry"):
            GeminiDDP(nn.Linear(2, 2), chunk_config_dict={2: {"size": 8}})


def test_a_model_without_parameters() -> None:
    with fake_world(2):
        model = GeminiDDP(nn.Tanh(), mixed_precision=None)
        assert model(torch.zeros(2)).tolist() == [0, 0]
        assert model.state_dict() == {}


def test_outputs_and_inputs_are_cast() -> None:
    with fake_world(1):
        options: dict[str, Any]
        for options, dtype in (
            ({}, torch.float16),
            ({"mixed_precision": torch.bfloat16}, torch.bfloat16),
            ({"mixed_precision": None}, torch.float64),
        ):
            model = GeminiDDP(nn.Linear(3, 2).double(), **options)
            assert model.module.weight.dtype == dtype
            assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == (
                torch.float64 if dtype == torch.float64 else torch.float32
            )
        model = GeminiDDP(nn.Linear(3, 2).double(), mixed_precision=None, force_outputs_fp32=True)
        assert model(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float32


def optimizer_moves(model: nn.Module, scatter: bool) -> list[bool]:
    wrapped, _ = wrap(model, None, scatter_after_inference=scatter, chunk_numel=1000)
    with torch.no_grad():
        wrapped(BATCHES[0])
    return [chunk.full is None for chunk in wrapped.chunks.chunks]


@pytest.mark.parametrize("scatter", [True, False])
def test_chunks_after_inference(scatter: bool) -> None:
    for released in run_threads(optimizer_moves, 2, model_of(Deep), scatter):
        assert all(released) == scatter


# ------------------------------------------------------------------------------------------------- Hugging Face

VOCABULARY, TOKENS = 31, 7


def hugging_face(name: str) -> nn.Module:
    import transformers

    common: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "gpt2":
        off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(n_positions=20, n_embd=12, n_layer=2, n_head=2, **common, **off)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        sizes = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes, **heads))
    if name == "bert":
        sizes: dict[str, Any] = {
            "hidden_size": 12,
            "intermediate_size": 20,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**common, **sizes, **off))
    config = transformers.T5Config(
        d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, **common
    )
    return transformers.T5ForConditionalGeneration(config)


def language_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


SENTENCES = [
    torch.randint(3, VOCABULARY, (4, TOKENS), generator=torch.Generator().manual_seed(seed)) for seed in range(2)
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_hugging_face(name: str, recompute: bool) -> None:
    pytest.importorskip("transformers")
    model = model_of(lambda: hugging_face(name))
    model.train()
    expected = train_alone(model, SENTENCES, make=sgd, loss=language_loss)
    if recompute:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    for options in ({"chunk_numel": 700}, {"chunk_numel": 700} | AUTO):
        ranks = run_threads(train_chunked, 2, model, SENTENCES, make=sgd, loss=language_loss, **options)
        assert_equal(ranks, expected, rtol=1e-5, atol=1e-7)  # some of its constants are in float32


def generate(model: nn.Module, **options: Any) -> list[list[int]]:
    wrapped, _ = wrap(model, None, chunk_numel=700, **options)
    wrapped.eval()
    with torch.no_grad(), wrapped.chunks.forward_pass():
        method = type(wrapped.module).generate  # the model's own is rejected, since users are outside of such a pass
        return method(wrapped.module, SENTENCES[0], max_new_tokens=5, do_sample=False).tolist()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generation(name: str) -> None:
    model = model_of(lambda: hugging_face(name)).eval()
    expected = model.generate(SENTENCES[0], max_new_tokens=5, do_sample=False).tolist()
    assert run_threads(generate, 2, model) == [expected] * 2
