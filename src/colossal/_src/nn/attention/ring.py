"""Ring attention: keys and values of a sharded sequence travel from rank to rank, queries stay."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.nn import functional

from colossal._src.comm import Channel, Exchange
from colossal._src.nn.attention.partial_attention import PartialAttention, attend, attend_backward
from colossal._src.nn.attention.sequence_sharding import SequenceSharding
from colossal.errors import ConfigError, ShapeError

Mask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Which keys queries attend to: takes their positions, of shapes (queries, 1) and (1, keys), and returns what
broadcasts to (batch, heads, queries, keys), True where a query attends to a key."""


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sharding: SequenceSharding,
    *,
    is_causal: bool = False,
    mask: Mask | None = None,
    scale: float | None = None,
    inner_ring_size: int | None = None,
) -> torch.Tensor:
    """Compute attention over the tokens of all ranks.

    A rank has the keys of two ranks at most. While it attends to some, the next are on their way. Under causal
    attention what no query sees is not computed.

    Args:
        query: This rank's tokens, (batch, heads, tokens, features).
        key: (batch, heads or a divisor of their number, tokens, features).
        value: Like `key`; the number of features may differ.
        sharding: How the sequence is sharded.
        is_causal: Whether a token attends only to itself and to earlier tokens.
        mask: Further restricts attention, by positions in the full sequence.
        scale: Factor of the attention scores; 1 / sqrt(features) by default.
        inner_ring_size: Ranks that form an inner ring, such as those of one host: links between
            such rings are used once in that many steps.

    Returns:
        The output for this rank's tokens, (batch, heads, tokens, features of the values).

    Raises:
        ShapeError: The heads of queries are no multiple of those of keys.
        ConfigError: `inner_ring_size` does not divide the number of ranks.

    Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023, https://arxiv.org/abs/2310.01889; Gu et al.,
    "LoongTrain", 2024, https://arxiv.org/abs/2406.18485 (the inner ring).

    Communication: send, the axis, the bytes of key and value, once for each other rank; backward the same, and in
    addition the gradients of both, once for each rank.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from colossal.cluster import ParallelMesh
        >>> from colossal.nn.attention import SequenceSharding, ring_attention
        >>> from colossal.testing import fake_world
        >>> x = torch.rand(1, 2, 4, 8)
        >>> with fake_world(1):
        ...     found = ring_attention(x, x, x, SequenceSharding(ParallelMesh(sp=1)), is_causal=True)
        >>> torch.allclose(found, scaled_dot_product_attention(x, x, x, is_causal=True))
        True
    """
    num_groups, features = _groups_of(query, key), value.shape[-1]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    # Keys and values travel as one tensor, so they have one number of features; the scale does not count the padding.
    most = max(query.shape[-1], features)
    query, key, value = (functional.pad(each, (0, most - each.shape[-1])) for each in (query, key, value))
    attention = _Attention(sharding, _KeyValueRing(sharding, inner_ring_size), factor, is_causal, mask, num_groups)
    out: Any = _Function.apply(query, torch.stack([key, value]), attention)
    return out[..., :features]


def _groups_of(query: torch.Tensor, key: torch.Tensor) -> int:
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads:
        raise ShapeError(
            f"Each head of keys is for as many heads of queries. Found {heads} and {key_heads}. Repeat keys and values."
        )
    return heads // key_heads


@final
class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, pair: torch.Tensor, attention: "_Attention") -> torch.Tensor:
        partial = PartialAttention.empty(query)
        for source, seen, _ in attention.ring.rotate(pair):
            attention.add(partial, query, seen, source)
        out = partial.out.to(query.dtype)
        ctx.attention = attention
        ctx.save_for_backward(query, pair, out, partial.lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, pair, out, lse = ctx.saved_tensors
        attention: _Attention = ctx.attention
        dtype = torch.promote_types(query.dtype, torch.float32)
        grad_query, own = torch.zeros_like(query, dtype=dtype), torch.zeros_like(pair, dtype=dtype)
        grad = grads[0].contiguous()
        for source, seen, back in attention.ring.rotate(pair, own):
            assert back is not None
            part = attention.differentiate(grad, query, seen, out, lse, source, grad_query)
            back.add(part)
        return grad_query.to(query.dtype), attention.ring.local_grad.to(pair.dtype), None


@final
@dataclass
class _Attention:
    """What is the same for all blocks."""

    sharding: SequenceSharding
    ring: "_KeyValueRing"
    scale: float
    is_causal: bool
    mask: Mask | None
    num_groups: int

    def add(self, partial: PartialAttention, query: torch.Tensor, pair: torch.Tensor, source: int) -> None:
        """Attend to the keys of one rank."""
        for rows, columns, is_causal, mask in self._blocks(query.shape[2], source, query.device):
            key, value = self._for_all_heads(pair[:, :, :, columns])
            out, lse = attend(query[:, :, rows], key, value, self.scale, is_causal, mask)
            partial.add(rows, out, lse)

    def differentiate(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        pair: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        source: int,
        grad_query: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of the keys and values of one rank, and add that of the queries up."""
        grad_pair = torch.zeros_like(pair, dtype=grad_query.dtype)
        for rows, columns, is_causal, mask in self._blocks(query.shape[2], source, query.device):
            key, value = self._for_all_heads(pair[:, :, :, columns])
            found = [each[:, :, rows].contiguous() for each in (grad, query, out, lse)]
            grads = attend_backward(found[0], found[1], key, value, found[2], found[3], self.scale, is_causal, mask)
            grad_query[:, :, rows] += grads[0]
            both = torch.stack(grads[1:]).to(grad_pair.dtype)
            grad_pair[:, :, :, columns] += both.unflatten(2, (-1, self.num_groups)).sum(3)
        return grad_pair

    def _for_all_heads(self, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = pair.repeat_interleave(self.num_groups, 2) if self.num_groups > 1 else pair.contiguous()
        return key, value

    def _blocks(
        self, length: int, source: int, device: torch.device
    ) -> Iterator[tuple[slice, slice, bool, torch.Tensor | None]]:
        """List which queries see which keys of a rank, whether causally, and which mask there is."""
        everything, rank = slice(0, length), self.sharding.mesh.rank(self.sharding.axis)
        if self.mask is not None:
            queries, keys = (self.sharding.positions(each, length, device) for each in (rank, source))
            seen = self.mask(queries[:, None], keys[None, :])
            if self.is_causal:
                seen = seen & (queries[:, None] >= keys[None, :])
            if not seen.is_cpu or seen.any():  # on an accelerator the answer would take longer than the block
                yield everything, everything, False, seen
        elif not self.is_causal or source == rank:
            yield everything, everything, self.is_causal, None
        elif not self.sharding.is_zigzag:
            if source < rank:
                yield everything, everything, False, None
        elif source < rank:  # all tokens attend to the early chunk of that rank, none to the late one
            yield everything, slice(0, length // 2), False, None
        else:  # the late chunk of this rank attends to both
            yield slice(length // 2, length), everything, False, None


class _KeyValueGrad:
    """The gradient of the keys that this rank has now: the sum over earlier ranks, and its own contribution."""

    def __init__(self, pair: torch.Tensor) -> None:
        self.total = pair
        self.arriving: Exchange | None = None

    def add(self, part: torch.Tensor) -> None:
        if self.arriving is not None:
            # Waited for only now, when this rank's contribution has been computed.
            self.total = self.arriving.wait()
        self.total += part


@final
class _KeyValueRing:
    """The ranks along an axis that pass keys and values on, with an optional inner ring."""

    def __init__(self, sharding: SequenceSharding, inner: int | None) -> None:
        self._channel = Channel(sharding.axis, sharding.mesh)
        self.local_grad = torch.empty(0, device="cpu")
        """The gradient of this rank's keys and values, from all ranks."""
        self._inner = sharding.size if inner is None else inner
        if self._inner < 1 or sharding.size % self._inner:
            raise ConfigError(
                f"Inner rings have equal size. Found inner_ring_size={inner} for {sharding.size} ranks over which a "
                "sequence is sharded. Pass a divisor of that number of ranks."
            )

    def rotate(
        self, pair: torch.Tensor, grads: torch.Tensor | None = None
    ) -> Iterator[tuple[int, torch.Tensor, _KeyValueGrad | None]]:
        """Pass keys and values around the ring."""
        source = rank = self._channel.rank
        back = None if grads is None else _KeyValueGrad(grads)
        for step in range(self._channel.size):
            is_last = step == self._channel.size - 1
            # Begun before the caller computes with this pair, so that the next one travels meanwhile.
            ahead = None if is_last else self._pass_on(pair.contiguous(), step)
            yield source, pair, back
            if back is not None:
                # Once more than the keys: after the last step the gradient arrives at the rank whose keys these are.
                back.arriving = self._pass_on(back.total, step)
            if ahead is not None:
                pair = ahead.wait()
                source = self._source(rank, step + 1)
        if back is not None:
            assert back.arriving is not None
            self.local_grad = back.arriving.wait()

    def _pass_on(self, tensor: torch.Tensor, step: int) -> Exchange:
        rank = self._channel.rank
        return Exchange(tensor, self._channel, self._neighbor(rank, step, 1), self._neighbor(rank, step, -1))

    def _neighbor(self, rank: int, step: int, way: int) -> int:
        """Find the next rank of the inner ring; at its end, that of the next ring as well."""
        outer, inner = divmod(rank, self._inner)
        if (step + 1) % self._inner == 0:
            outer = (outer + way) % (self._channel.size // self._inner)
        return outer * self._inner + (inner + way) % self._inner

    def _source(self, rank: int, step: int) -> int:
        """Find whose keys a rank has at a step."""
        # Steps between inner rings take other ways than those within, so each is traced back.
        for before in reversed(range(step)):
            rank = self._neighbor(rank, before, -1)
        return rank
