"""Gram matrices H = Σ s_t x_t x_tᵀ of what enters a linear layer, and the drift beside them, accumulated in float32.

The stacked activations never exist (the paper's Algorithm 1 and "Hessian calculation"). No call waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from qprecon.halves import has_fast_halves

BATCH_ROWS = 8192  # rows that one product takes: with fewer, adding to H costs as much as the product
HELD_ROWS = 2048  # of a sample that is held out of the drift
_TILE, _TILES_WANTED = 128, 264  # a float32 product's tile, and two for each unit of an H100
PANELS, PANELS_FROM = 4, 8192  # H is made in so many row panels of its upper triangle, from so many inputs on


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
        x_TN, delta_TN = x.reshape(-1, x.shape[-1]), (dense.float() - x.float()).reshape(-1, x.shape[-1])
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
        """`sum_NK` plus Σ s_t x_t delta_tᵀ; delta is float32 and may be changed."""
        x_TN, delta_TK = x.reshape(-1, x.shape[-1]), delta.reshape(-1, delta.shape[-1])
        if weights_T is not None:
            delta_TK = delta_TK.mul_(weights_T.float().unsqueeze(1))
        if sum_NK is None:
            sum_NK = torch.zeros(x_TN.shape[1], delta_TK.shape[1], dtype=torch.float32, device=x.device)
        wide = _is_wide(x_TN) and x.dtype == torch.bfloat16  # float16 has not the range for small differences
        x_TN, delta_TK = (x_TN, delta_TK.to(x.dtype)) if wide else (x_TN.float(), delta_TK)
        for rows in self._panels():
            if wide:
                sum_NK[rows] += torch.mm(x_TN[:, rows].t(), delta_TK, out_dtype=torch.float32)
            else:
                sum_NK[rows].addmm_(x_TN[:, rows].t(), delta_TK)
        return sum_NK

    def add_residual(
        self, x: torch.Tensor, stream: torch.Tensor, dense: torch.Tensor, weights_T: torch.Tensor | None = None
    ) -> None:
        """Add Σ s_t x_t (dense_t − stream_t)ᵀ; x is (…, N), the two others (…, K), of the same tokens."""
        self.residual_NK = self._cross(self.residual_NK, x, dense.float() - stream.float(), weights_T)

    def accumulate(self, x_TN: torch.Tensor) -> None:
        """One product, of the upper panels only where H is large."""
        wide = _is_wide(x_TN)
        x_TN = x_TN if wide else x_TN.float()
        for rows in self._panels():
            part_NN, left_TN, right_TN = self.hessian_NN[rows, rows.start :], x_TN[:, rows], x_TN[:, rows.start :]
            if wide:
                # Products of two 16-bit floats are exact in float32, so only the summation rounds.
                part_NN += torch.mm(left_TN.t(), right_TN, out_dtype=torch.float32)
            elif (pieces := pieces_of(x_TN)) > 1:
                even = len(x_TN) // pieces * pieces
                parts_PTN = x_TN[:even].reshape(pieces, -1, x_TN.shape[1])
                part_NN += torch.bmm(parts_PTN.mT, parts_PTN).sum(0)
                part_NN.addmm_(x_TN[even:].t(), x_TN[even:])
            else:
                part_NN.addmm_(left_TN.t(), right_TN)

    def finish(self) -> None:
        """Add what is buffered, and fill the lower triangle."""
        self._flush()
        self.buffer_TN = None
        for rows in self._panels():
            self.hessian_NN[rows.stop :, rows] = self.hessian_NN[rows, rows.stop :].t()

    def _flush(self) -> None:
        if self.filled:
            self.accumulate(self.buffer_TN[: self.filled])
            self.filled = 0

    def _panels(self) -> list[slice]:
        size = len(self.hessian_NN)
        step = -(-size // PANELS) if size >= PANELS_FROM else max(size, 1)
        return [slice(first, min(first + step, size)) for first in range(0, size, step)]


def _is_wide(x_TN: torch.Tensor) -> bool:
    """Whether its products can be made in 16 bits with float32 sums."""
    return x_TN.dtype in (torch.float16, torch.bfloat16) and has_fast_halves(x_TN)


def scaled_rows(x_TN: torch.Tensor, factors_T: torch.Tensor) -> torch.Tensor:
    """Each row times its factor, computed in float32; in bfloat16 where x is, whose range suffices, else float32."""
    scaled_TN = x_TN * factors_T.float().unsqueeze(1)
    return scaled_TN.to(x_TN.dtype) if x_TN.dtype == torch.bfloat16 else scaled_TN


def pieces_of(x_TN: torch.Tensor) -> int:
    """Into how many sums of rows xᵀx is split: a small H has too few tiles to occupy a GPU with one product in float32."""
    tiles = (-(-x_TN.shape[1] // _TILE)) ** 2
    if not x_TN.is_cuda or len(x_TN) < BATCH_ROWS // 2:
        return 1
    return max(1, min(16, _TILES_WANTED // tiles))
