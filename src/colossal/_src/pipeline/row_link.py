"""Tensors from one rank of a pipeline to another in forward-only execution, without an exchange of shapes in each pass.

Both ranks know how many rows pass: a plan of the pass, which all ranks have, says it. Features and dtype are those of
the model, so they come once, with the first tensor.
"""

from typing import final

import torch

from colossal._src.pipeline.p2p import HEADER_LENGTH, P2PLink, TensorMeta, decode_metas, encode_metas, wait
from colossal.errors import ShapeError


@final
class RowLink:
    """Sends tensors of shape (..., features) to another rank of the pp axis, and receives such tensors from it."""

    def __init__(self, link: P2PLink) -> None:
        self._link = link
        self._sent: TensorMeta | None = None
        self._received: TensorMeta | None = None

    def send(self, rows: torch.Tensor) -> None:
        """Send, without waiting.

        Communication: send, pp, the bytes of the rows; once, 512 bytes more.
        """
        meta = TensorMeta.of(rows)
        if self._sent is None:
            self._sent = meta
            self._link.send(encode_metas([meta]).to(self._link.device))
        elif (meta.shape[-1], meta.dtype) != (self._sent.shape[-1], self._sent.dtype):
            raise ShapeError(
                "In each pass, tensors of the same features and dtype leave a stage. Found "
                f"{meta.shape[-1]} features in {meta.dtype} after {self._sent.shape[-1]} in {self._sent.dtype}. Do not "
                "cast the model after its first pass, nor run it under autocast in some passes only."
            )
        self._link.send(rows)

    def receive(self, *sizes: int) -> torch.Tensor:
        """Wait for a tensor, of which `sizes` are all sizes but the last."""
        if self._received is None:
            header = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._link.device)
            wait(self._link.post(header))
            [self._received] = decode_metas(header)
        meta = self._received
        rows = torch.empty(*sizes, meta.shape[-1], dtype=meta.dtype, device=self._link.device)
        wait(self._link.post(rows))
        return rows
