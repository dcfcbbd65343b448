"""What operations of torch mean for distributed tensors.

[Note: gradients] A replicated tensor has the same gradient on all ranks, that of the full tensor; a shard has that of
its elements. So where ranks compute different things from one replicated tensor, as the columns of a product, its
gradients are summed (`comm.replicate`); where their partial sums add up, the sum's gradient is that of each.

[Note: what is not listed] An operation that is not listed here gathers its sharded arguments and returns replicated
tensors: always right, at the price of the communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from colossal._src import comm
from colossal._src.legacy.tensor.sharding import OperatorCall, TensorSharding, sharding_of
from colossal._src.nn.loss import VocabParallelCrossEntropyLoss
from colossal.errors import UnsupportedError

_Rule = Callable[..., Any]


def _set_of(names: str) -> frozenset[str]:
    return frozenset(names.split())


_ELEMENTWISE = _set_of(
    """
    abs add sub mul div true_divide neg exp log sqrt rsqrt square pow sigmoid tanh erf sin cos reciprocal sign
    floor ceil round relu gelu silu elu leaky_relu softplus hardtanh relu6 hardswish mish celu selu logsigmoid
    clamp maximum minimum where masked_fill lerp addcmul addcdiv to float half bfloat16 double type_as clone
    contiguous detach alias cpu isnan isfinite nan_to_num eq ne lt le gt ge __add__ __radd__ __sub__ __rsub__
    __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__ __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    sgn logical_not
    """
)
_ELEMENTWISE_IN_PLACE = _set_of(
    """
    add_ sub_ mul_ div_ copy_ zero_ fill_ clamp_ lerp_ addcmul_ addcdiv_ sqrt_ neg_ exp_ abs_ pow_ relu_ sigmoid_
    tanh_ masked_fill_ reciprocal_ square_ __iadd__ __isub__ __imul__ __itruediv__
    """
)


def product(call: OperatorCall, x: torch.Tensor, weight: torch.Tensor, bias: Any, out_dim: int, multiply: _Rule) -> Any:
    """Multiply by a weight that is sharded along its columns or its rows.

    Communication: column: backward all_reduce, tp, the input's bytes; all_gather, tp, the output's bytes, if it is to
    be replicated. Row: all_reduce, tp, the output's bytes.
    """
    sharding = sharding_of(weight)
    if sharding is None or sharding.dim is None or _is_vector(x):
        return NotImplemented
    mesh, num_out = sharding.group.mesh, sharding.layout.shape[out_dim]
    if sharding.dim == out_dim:
        shared = comm.replicate(call.converted(x, None, sharding), "tp", mesh)
        local = multiply(shared, weight, None if bias is None else call.converted(bias, 0, sharding))
        return _column_output(call, local, num_out, sharding)
    sharded = call.converted(x, _dims_of(x) - 1, sharding)
    total = comm.reduce(multiply(sharded, weight, None), "tp", mesh)
    if bias is not None:
        total = total + call.converted(bias, None, sharding)
    return call.wrap_full(total, sharding)


def linear(call: OperatorCall, input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:  # noqa: A002 (torch's name)
    """Run `torch.nn.functional.linear`, whose weight is (out, in)."""

    def multiply(x: torch.Tensor, own: torch.Tensor, own_bias: Any) -> torch.Tensor:
        return call.run(functional.linear, x, own, own_bias)

    return product(call, input, weight, bias, 0, multiply)


def addmm(call: OperatorCall, input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any) -> Any:  # noqa: A002
    """Run `torch.addmm`, as GPT-2's Conv1D uses it, whose weight is (in, out)."""
    if any(number != 1 for number in options.values()) or _dims_of(input) != 1:
        return NotImplemented

    def multiply(x: torch.Tensor, own: torch.Tensor, own_bias: Any) -> torch.Tensor:
        return call.run(torch.mm, x, own) if own_bias is None else call.run(torch.addmm, own_bias, x, own)

    return product(call, mat1, mat2, input, 1, multiply)


def matmul(call: OperatorCall, input: torch.Tensor, other: torch.Tensor) -> Any:  # noqa: A002
    """Run `torch.matmul`, with a matrix on the right."""
    if sharding_of(other) is None or _dims_of(other) != 2:  # noqa: PLR2004 (a matrix)
        return NotImplemented

    def multiply(x: torch.Tensor, own: torch.Tensor, _bias: Any) -> torch.Tensor:
        return call.run(torch.matmul, x, own)

    return product(call, input, other, None, 1, multiply)


def embedding(
    call: OperatorCall,
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Look up rows of a table that is sharded along its features or its rows.

    Communication: features: all_gather, tp, the output's bytes, if it is to be replicated. Rows: all_reduce, tp, the
    output's bytes.
    """
    sharding = sharding_of(weight)
    if sharding is None or sharding.dim is None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    del norm_type  # of max_norm
    tokens = call.converted(input, None, sharding)
    number, features = sharding.layout.shape
    if sharding.dim == 1:
        local = call.run(functional.embedding, tokens, weight, padding_idx)
        return _column_output(call, local, features, sharding)
    if bool(((tokens < 0) | (tokens >= number)).any()):
        raise IndexError(f"Tokens are rows of a table, from 0 to {number - 1}. Found others. Check the token ids.")
    mesh = sharding.group.mesh
    ((first, length),) = sharding.layout.extents(0, (mesh.rank("tp"),))
    is_here = (tokens >= first) & (tokens < first + length)
    padding = None if padding_idx is None else padding_idx % number - first
    rows = call.local(weight)
    if not length:
        found = rows.new_zeros(*tokens.shape, features) + rows.sum()
    else:
        own = padding if padding is not None and 0 <= padding < length else None
        found = functional.embedding((tokens - first).where(is_here, 0), rows, own)
    return call.wrap_full(comm.reduce(found.masked_fill(~is_here.unsqueeze(-1), 0.0), "tp", mesh), sharding)


def cross_entropy(
    call: OperatorCall,
    input: torch.Tensor,  # noqa: A002
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the loss of logits whose classes are sharded, without gathering them."""
    sharding = sharding_of(input)
    is_plain = weight is None and size_average is None and reduce is None and not target.is_floating_point()
    if sharding is None or sharding.dim != 1 or len(sharding.layout.shape) != 2 or not is_plain:  # noqa: PLR2004
        return NotImplemented
    loss = VocabParallelCrossEntropyLoss(
        ignore_index, reduction, label_smoothing, num_classes=sharding.layout.shape[1], mesh=sharding.group.mesh
    )
    return call.wrap_full(loss(call.local(input), call.converted(target, None, sharding)), sharding)


def view(call: OperatorCall, tensor: torch.Tensor, *sizes: Any, **named: Any) -> Any:
    """Change the shape of a tensor, whose sizes are those of the full one."""
    sharding = sharding_of(tensor)
    given = sizes[0] if len(sizes) == 1 else sizes
    if sharding is None or sharding.dim is None or named or isinstance(given, int | torch.dtype):
        return NotImplemented
    old, new = sharding.layout.shape, _resolve(tuple(given), sharding)
    local, dim = call.local(tensor), sharding.dim
    if dim == len(old) - 1 and new[-1:] == old[-1:]:
        target, kept = len(new) - 1, (*new[:-1], local.shape[-1])
    elif dim == 0 and new[:1] == old[:1]:
        target, kept = 0, (local.shape[0], *new[1:])
    else:
        return NotImplemented
    return call.wrap(call.func(local, kept), new, target, sharding)


def size(call: OperatorCall, tensor: torch.Tensor, dim: int | None = None) -> Any:
    """Return the size of the full tensor, as documented; its attribute `shape` is that of the local one."""
    known = sharding_of(tensor)
    full = torch.Size(known.layout.shape) if known is not None else call.run(torch.Tensor.size, tensor)
    return full if dim is None else full[dim]


def elementwise(call: OperatorCall) -> Any:
    """Run an operation on each element: what is sharded stays so."""
    sharding = call.sharded
    assert sharding is not None
    if _all_local(call, sharding):
        result = call.run(call.func, *(args := call.map_args(call.local))[0], **args[1])
        return call.wrap_as(result, sharding) if isinstance(result, torch.Tensor) else result
    shapes = [full_shape(value) for value in _operands(call)]
    shape = torch.broadcast_shapes(*shapes)
    assert sharding.dim is not None
    dim = sharding.dim + len(shape) - len(sharding.layout.shape)
    if shape[dim] != sharding.layout.shape[sharding.dim]:
        return NotImplemented  # a shard of length 1 that is broadcast
    args, kwargs = call.map_args(lambda value: _aligned(call, value, shape, dim, sharding))
    result = call.run(call.func, *args, **kwargs)
    return call.wrap(result, shape, dim, sharding) if isinstance(result, torch.Tensor) else result


def in_place(call: OperatorCall) -> Any:
    """Write to a sharded tensor: elementwise operations write to the shard, others to a copy of the full tensor."""
    tensor: Any = call.args[0]
    sharding = sharding_of(tensor)
    if sharding is None or sharding.dim is None:
        sharded = call.sharded
        assert sharded is not None
        args, kwargs = call.map_args(lambda value: value if value is tensor else call.converted(value, None, sharded))
        call.run(call.func, *args, **kwargs)
        return tensor
    if name_of(call.func) in _ELEMENTWISE_IN_PLACE:
        args, kwargs = call.map_args(lambda value: tensor if value is tensor else _matching(call, value, sharding))
        call.run(call.func, *args, **kwargs)
        return tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise UnsupportedError(
            f"Of a sharded tensor, autograd can follow what is written elementwise. Found {name_of(call.func)}. Call "
            "to_replicate() first, or write under torch.no_grad()."
        )
    full = call.converted(tensor, None, sharding).clone()
    args, kwargs = call.map_args(lambda value: full if value is tensor else call.converted(value, None, sharding))
    call.run(call.func, *args, **kwargs)
    own = call.wrap(full, sharding.layout.shape, None, sharding)
    call.run(torch.Tensor.copy_, tensor, call.converted(own, sharding.dim, sharding))
    return tensor


def compare(call: OperatorCall, *_args: Any, **_kwargs: Any) -> Any:
    """Compare the shard with a plain tensor that has its shape; anything else as full tensors."""
    if call.sharded is None or not _all_local(call, call.sharded):
        return NotImplemented
    args, kwargs = call.map_args(call.local)
    return call.run(call.func, *args, **kwargs)


def gathered(call: OperatorCall) -> Any:
    """Run an operation on full tensors, see [Note: what is not listed]."""
    sharding = call.sharded
    assert sharding is not None
    args, kwargs = call.map_args(lambda value: call.converted(value, None, sharding))
    return call.wrap_full(call.run(call.func, *args, **kwargs), sharding)


RULES: dict[Any, _Rule] = {
    functional.linear: linear,
    torch.addmm: addmm,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.mm: matmul,
    torch.Tensor.__matmul__: matmul,
    functional.embedding: embedding,
    functional.cross_entropy: cross_entropy,
    torch.equal: compare,
    torch.allclose: compare,
    torch.Tensor.equal: compare,
    torch.Tensor.allclose: compare,
    torch.Tensor.view: view,
    torch.Tensor.reshape: view,
    torch.reshape: view,
}


def run_rule(call: OperatorCall) -> Any:
    """Run an operation some of whose arguments are sharded."""
    rule = RULES.get(call.func)
    if rule is not None:
        result = rule(call, *call.args, **call.kwargs)
        if result is not NotImplemented:
            return result
    name = name_of(call.func)
    if is_in_place(name):
        return in_place(call)
    if name in _ELEMENTWISE:
        result = elementwise(call)
        if result is not NotImplemented:
            return result
    return gathered(call)


def is_in_place(name: str) -> bool:
    """Return whether an operation writes to its first argument, by its name."""
    return name in _ELEMENTWISE_IN_PLACE or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def name_of(func: Any) -> str:
    """Return the name of an operation of torch."""
    return getattr(func, "__name__", "")


def full_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the full tensor."""
    known = sharding_of(value)
    return tuple(value.shape) if known is None else known.layout.shape


def _column_output(call: OperatorCall, local: torch.Tensor, num_out: int, sharding: TensorSharding) -> torch.Tensor:
    """Return the output of which each rank has some of the last dimension, gathered if the weight says so."""
    shape = (*local.shape[:-1], num_out)
    wrapped = call.wrap(local, shape, local.dim() - 1, sharding)
    if sharding.compute is not None and not sharding.compute.output_replicate:
        return wrapped
    return call.wrap_full(call.converted(wrapped, None, sharding), sharding)


def _operands(call: OperatorCall) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def collect(value: torch.Tensor) -> torch.Tensor:
        found.append(value)
        return value

    call.map_args(collect)
    return found


def _aligned(
    call: OperatorCall, value: torch.Tensor, shape: tuple[int, ...], dim: int, sharding: TensorSharding
) -> torch.Tensor:
    """Return of an argument what belongs to this rank's elements of the result."""
    own = full_shape(value)
    at = dim - (len(shape) - len(own))
    if at >= 0 and own[at] == shape[dim]:
        return call.converted(value, at, sharding)
    # Each rank uses all of it for other elements, so that its gradients add up.
    full = call.converted(value, None, sharding)
    return comm.replicate(full, "tp", sharding.group.mesh) if full.is_floating_point() else full


def _matching(call: OperatorCall, value: torch.Tensor, sharding: TensorSharding) -> torch.Tensor:
    """Return of an argument what belongs to a shard that is written: the states of optimizers are local already."""
    local = tuple(call.args[0].shape)
    if sharding_of(value) is None and (tuple(value.shape) == local != sharding.layout.shape or not value.dim()):
        return value
    assert sharding.dim is not None
    return _aligned(call, value, sharding.layout.shape, sharding.dim, sharding)


def _all_local(call: OperatorCall, sharding: TensorSharding) -> bool:
    """Whether plain arguments have the shape of this rank's shard, and none that could stand for the full tensor."""
    operands = _operands(call)
    plain = [value for value in operands if sharding_of(value) is None]
    has_one_layout = all(known.layout == sharding.layout for known in call.known)
    local = next(call.local(value) for value in operands if sharding_of(value) is not None)
    is_local = all(value.shape == local.shape for value in plain)
    return bool(plain) and has_one_layout and is_local and not _broadcasts(local.shape, sharding.layout.shape)


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a shape fits a full one; also where a shard has a length of 1, which every rank has to use."""
    return all(length in (1, other) for length, other in zip(shape, full, strict=True))


def _dims_of(value: torch.Tensor) -> int:
    return len(full_shape(value))


def _is_vector(value: torch.Tensor) -> bool:
    return _dims_of(value) < 2  # noqa: PLR2004 (a matrix)


def _resolve(sizes: tuple[Any, ...], sharding: TensorSharding) -> tuple[int, ...]:
    """Fill in the size that was left out."""
    empty = torch.empty(sharding.layout.shape, device="meta")
    return tuple(empty.reshape(sizes).shape)
