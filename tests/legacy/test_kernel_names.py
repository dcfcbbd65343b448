# pyright: reportMissingImports=false
"""The kernel of Adam takes the arguments of the older extensions; older calls of several operations compute them."""

import pytest
import torch
from torch.nn import functional

from colossal.errors import UnsupportedError
from colossal.kernel.jit import (
    bias_dropout_add_fused_inference,
    bias_dropout_add_fused_train,
    bias_gelu_impl,
    set_jit_fusion_options,
)
from colossal.kernel.kernel_loader import CPUAdamLoader, FusedOptimizerLoader
from colossal.utils import multi_tensor_applier

LR, BETAS, EPS, DECAY, STEPS, SCALE = 0.05, (0.8, 0.95), 1e-3, 0.1, 3, 64.0


def draw(seed: int) -> torch.Tensor:
    return torch.randn(12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("name", ["CPUAdamOptimizer", "multi_tensor_adam"])
def test_the_kernel_of_adam_steps_as_torch(name: str, is_decoupled: bool, dtype: torch.dtype) -> None:
    expected = draw(0).requires_grad_()
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    optimizer = kind([expected], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    param, mean, square = draw(0).to(dtype), torch.zeros(12, dtype=dtype), torch.zeros(12, dtype=dtype)
    for step in range(1, STEPS + 1):
        grad = draw(step)
        expected.grad = grad.clone()
        optimizer.step()
        scaled = (SCALE * grad).to(dtype)
        if name == "CPUAdamOptimizer":
            adam = CPUAdamLoader().load().CPUAdamOptimizer(1.0, 0.0, 0.0, 1.0, 0.0, is_decoupled)
            adam.step(step, LR, *BETAS, EPS, DECAY, True, param, scaled, mean, square, SCALE)
        else:
            lists = [[scaled], [param], [mean], [square]]
            adam = FusedOptimizerLoader().load().multi_tensor_adam
            numbers = (LR, *BETAS, EPS, step, int(is_decoupled), 1, DECAY, SCALE)
            multi_tensor_applier(adam, torch.tensor([0], dtype=torch.int), lists, *numbers)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(param.float(), expected.detach(), rtol=rtol, atol=atol)
    assert (mean.dtype, square.dtype) == (dtype, dtype)
    assert square.min() > 0


def test_a_kernel_that_is_not_there_says_what_to_use() -> None:
    with pytest.raises(UnsupportedError, match="Found 'multi_tensor_sgd'. Use FusedSGD or FusedLAMB"):
        _ = FusedOptimizerLoader().load().multi_tensor_sgd


def test_calls_of_several_operations_compute_them() -> None:
    x, bias, residual = draw(1).view(3, 4).double(), draw(2)[:4].double(), draw(3).view(3, 4).double()
    set_jit_fusion_options()
    torch.testing.assert_close(bias_gelu_impl(x, bias), functional.gelu(x + bias, approximate="tanh"))
    whole = residual + x + bias
    torch.testing.assert_close(bias_dropout_add_fused_inference(x, bias, residual, 0.5), whole)
    torch.manual_seed(4)
    found = bias_dropout_add_fused_train(x, bias, residual, 0.5) - residual
    torch.manual_seed(4)
    torch.testing.assert_close(found, functional.dropout(x + bias, 0.5))
    assert 0 < (found == 0).sum() < found.numel()
