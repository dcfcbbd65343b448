# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
"""Any model trains in chunks as in one process: nothing is assumed of how it uses its parameters."""

from typing import Any

import pytest
import torch
from chosen import crossed
from chunked import (
    AUTO,
    BATCHES,
    EXACT,
    PLACEMENTS,
    ROWS,
    WIDTH,
    Branches,
    Deep,
    assert_equal,
    loss_of,
    model_of,
    sgd,
    train_alone,
    train_chunked,
    wrap,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from colossal.testing import run_threads


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
