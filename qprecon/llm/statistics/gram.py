"""Gram matrices H = Σ s_t x_t x_tᵀ of what enters a linear layer, and the drift beside them, accumulated in float32.

The stacked activations never exist (the paper's Algorithm 1 and "Hessian calculation"). The products are those of
`qprecon.data.sums`. No call waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from qprecon.data.sums import MANY_ROWS, add_cross, add_gram, is_wide, mirror

BATCH_ROWS = MANY_ROWS
HELD_ROWS = 2048  # of a sample that is held out of the drift


@dataclass
class Gram:
    """Σ s_t x_t x_tᵀ over `tokens` rows, float32 (N, N), s_t = 1 unless weights are given; complete after `finish`.

    With `batched`, 16-bit rows are copied to a buffer of BATCH_ROWS first, so that a product is worth its overhead. (A block may
    change x in place afterwards, so it cannot just be kept.)

    drift_NN: Σ s_t x_t (x'_t − x_t)ᵀ with x' the dense model's rows for the same tokens, where they were given. It is summed from
    the differences: as a difference of two Gram matrices it would be lost in their rounding. held: rows √s·(x, x' − x) of
    samples that were held out of the drift, some thousand tokens of each, to see what it explains. residual_NK: Σ s_t x_t (r'_t −
    r_t)ᵀ, (N, K), with r the residual stream that the layer's output is added to, r' the dense model's.
    """

    hessian_NN: torch.Tensor
    tokens: int = 0
    batched: bool = False
    # What this sample has added already, by identity; holding the tensors keeps their addresses from being reused.
    seen: dict[tuple, torch.Tensor] = field(default_factory=dict)
    buffer_TN: torch.Tensor | None = None
    filled: int = 0
    drift_NN: torch.Tensor | None = None
    drift_tokens: int = 0
    residual_NK: torch.Tensor | None = None
    held: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, x: torch.Tensor, weights_T: torch.Tensor | None = None) -> None:
        """Add xᵀx of x (…, N) of any floating dtype, or Σ s_t x_t x_tᵀ with `weights_T`, (T,); products and sums are float32."""
        x_TN = x.reshape(-1, x.shape[-1])
        if weights_T is not None:
            x_TN = scaled_rows(x_TN, weights_T.sqrt())
        rows = x_TN.shape[0]
        self.tokens += rows
        if not self.batched or x_TN.element_size() > 2 or 2 * rows > BATCH_ROWS:
            self.accumulate(x_TN)
            return
        if self.buffer_TN is None:
            self.buffer_TN = torch.empty(BATCH_ROWS, x_TN.shape[1], dtype=x_TN.dtype, device=x.device)
        if self.filled + rows > BATCH_ROWS:
            self._flush()
        self.buffer_TN[self.filled : self.filled + rows] = x_TN
        self.filled += rows

    def add_drift(
        self, x: torch.Tensor, dense: torch.Tensor, weights_T: torch.Tensor | None = None, *, held_out: bool = False
    ) -> None:
        """Add Σ s_t x_t (dense_t − x_t)ᵀ; both (…, N), of the same tokens in the same order. With `held_out`, keep rows instead."""
        x_TN, delta_TN = x.reshape(-1, x.shape[-1]), _difference(dense, x).reshape(-1, x.shape[-1])
        if held_out:
            every = slice(None, None, -(-len(x_TN) // HELD_ROWS))
            roots_R1 = 1.0 if weights_T is None else weights_T[every].float().sqrt().unsqueeze(1)
            self.held.append((x_TN[every].float() * roots_R1, delta_TN[every] * roots_R1))
            return
        self.drift_tokens += len(x_TN)
        self.drift_NN = self._cross(self.drift_NN, x_TN, delta_TN, weights_T)

    def _cross(
        self, sum_NK: torch.Tensor | None, x: torch.Tensor, delta: torch.Tensor, weights_T: torch.Tensor | None
    ) -> torch.Tensor:
        """`sum_NK` plus Σ s_t x_t delta_tᵀ; delta is float32."""
        x_TN, delta_TK = x.reshape(-1, x.shape[-1]), delta.reshape(-1, delta.shape[-1])
        if sum_NK is None:
            sum_NK = torch.zeros(x_TN.shape[1], delta_TK.shape[1], dtype=torch.float32, device=x.device)
        # float16 has not the range for small differences
        dtype = x.dtype if is_wide(x_TN, sum_NK) and x.dtype == torch.bfloat16 else torch.float32
        delta_TK = delta_TK.to(dtype) if weights_T is None else _times(delta_TK, weights_T, dtype)
        add_cross(sum_NK, x_TN, delta_TK)
        return sum_NK

    def add_residual(
        self, x: torch.Tensor, stream: torch.Tensor, dense: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> None:
        """Add Σ s_t x_t (dense_t − stream_t)ᵀ; x is (…, N), the two others (…, K), of the same tokens."""
        self.residual_NK = self._cross(self.residual_NK, x, _difference(dense, stream), weights_T)

    def accumulate(self, x_TN: torch.Tensor) -> None:
        """One product, of the upper panels only where H is large."""
        add_gram(self.hessian_NN, x_TN)

    def finish(self) -> None:
        """Add what is buffered, and fill the lower triangle."""
        self._flush()
        self.buffer_TN = None
        mirror(self.hessian_NN)

    def _flush(self) -> None:
        if self.filled:
            self.accumulate(self.buffer_TN[: self.filled])
            self.filled = 0


def scaled_rows(x_TN: torch.Tensor, factors_T: torch.Tensor) -> torch.Tensor:
    """Each row times its factor, computed in float32; in bfloat16 where x is, whose range suffices, else float32."""
    wide = torch.promote_types(x_TN.dtype, torch.float32)
    return _times(x_TN, factors_T, x_TN.dtype if x_TN.dtype == torch.bfloat16 else wide)


def _times(x_TN: torch.Tensor, factors_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each row times its factor, computed in float32 at least and written in `dtype`: one pass over memory on a GPU."""
    return torch.mul(x_TN, factors_T.float().unsqueeze(1), out=torch.empty(x_TN.shape, dtype=dtype, device=x_TN.device))


def _difference(dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dense − x of their float32 numbers."""
    return dense.to(torch.float32, copy=True).sub_(x if x.element_size() == 2 else x.float())
