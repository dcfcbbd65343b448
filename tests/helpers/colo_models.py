"""A small language model as the older documentation has it, and its layout by distributed parameters."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from colossal.legacy.tensor import (
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
)

VOCABULARY, WIDTH, LENGTH, HEADS = 12, 8, 5, 2


class Projection(nn.Module):
    """A linear layer whose weight is (in, out), computed by addmm, as GPT-2 has it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.num_out = num_out
        self.weight = nn.Parameter(torch.randn(num_in, num_out) * 0.3)
        self.bias = nn.Parameter(torch.randn(num_out) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = (*x.size()[:-1], self.num_out)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(sizes)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.c_attn = Projection(WIDTH, 3 * WIDTH)
        self.c_proj = Projection(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Projection(WIDTH, 4 * WIDTH), "c_proj": Projection(4 * WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.c_attn(self.ln(x)).split(WIDTH, dim=-1)
        heads = [each.view(*each.shape[:-1], HEADS, -1).transpose(1, 2) for each in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](x)))


class LanguageModel(nn.Module):
    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.lm_head(self.ln_f(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of predicting the next token."""
    shifted, labels = logits[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def split(parameter: Any, group: ProcessGroup, dim: int, output_replicate: bool = True) -> None:
    if parameter.process_group.tp_world_size() == 1:
        parameter.set_process_group(group)
    parameter.set_tensor_spec(ShardSpec([dim], [group.tp_world_size()]), ComputeSpec(ComputePattern.TP1D))
    if not output_replicate:
        parameter.compute_spec.set_output_replicate(False)


def tensor_parallelize(model: nn.Module, group: ProcessGroup, *, vocabulary_rows: bool = False) -> None:
    """Shard a model as the older documentation does: embeddings and attention by columns, the MLP by both."""
    for path, module in model.named_modules():
        parameter: Any
        for name, parameter in module.named_parameters(recurse=False):
            if hasattr(parameter, "visited"):
                continue
            parameter.set_dist_spec(ReplicaSpec())
            if "mlp.c_fc" in path:
                split(parameter, group, -1, output_replicate=False)
            elif "mlp.c_proj" in path:
                if name == "weight":
                    split(parameter, group, 0)
            elif path in ("wte", "wpe"):
                split(parameter, group, 0 if vocabulary_rows else -1)
            elif "c_attn" in path or "c_proj" in path:
                split(parameter, group, -1)
            parameter.visited = True


def tokens_of(step: int, size: int = 4) -> torch.Tensor:
    """The batch of a step, for all data-parallel ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCABULARY, (size, LENGTH), generator=generator)


def make_model(*, recompute: bool = False) -> LanguageModel:
    """The same model on all ranks, whose threads share the generator of random numbers."""
    model = LanguageModel(recompute=recompute)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * values)
    return model
