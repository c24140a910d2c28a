"""Named problems for the benchmarks: synthetic layers with a chosen spectrum and outlier channels, and real ones from files."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Synthetic:
    """A layer with H = S Q diag(i^-power) Qᵀ S: Q random orthogonal, S log-normal channel scales with a few outliers of 20 times.

    The mask is Wanda's, a comparison group per output.
    """

    name: str
    n_inputs: int
    n_outputs: int
    power: float
    sparsity: float
    outliers: int = 6
    seed: int = 0

    def make(self, device: str = "cpu"):
        """H (N, N), W (N, K) float32 and mask (N, K) bool as torch tensors on ``device``."""
        import torch

        n, k = self.n_inputs, self.n_outputs
        generator = torch.Generator(device).manual_seed(self.seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
        q_NN = torch.linalg.qr(draw(n, n))[0]
        spectrum_N = torch.arange(1, n + 1, device=device, dtype=torch.float32) ** -self.power
        scale_N = torch.exp(0.5 * draw(n))
        scale_N[torch.randperm(n, generator=generator, device=device)[: self.outliers]] *= 20.0
        root_NN = q_NN * spectrum_N.sqrt()[None, :] * scale_N[:, None]
        h_NN = root_NN @ root_NN.T
        h_NN *= n / h_NN.diagonal().sum()
        w_NK = 0.02 * draw(n, k)
        return h_NN, w_NK, wanda_mask(h_NN, w_NK, self.sparsity)


@dataclass(frozen=True)
class Real:
    """A whole layer from an .npz with H (N, N) and W (N, K), as make_fixtures.py --whole writes them; Wanda's mask."""

    path: Path
    sparsity: float = 0.5

    @property
    def name(self) -> str:
        n, k = self.shape
        return f"{self.path.stem.replace('_', ' ')}, {n}x{k} {100 * self.sparsity:.0f}%"

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return np.load(self.path)["W"].shape

    @property
    def n_inputs(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def n_outputs(self) -> int:
        """K."""
        return self.shape[1]

    def make(self, device: str = "cpu"):
        """H, W and mask as ``Synthetic.make`` gives them."""
        import torch

        return tuple(torch.as_tensor(array, device=device) for array in from_file(self.path, sparsity=self.sparsity))


def wanda_mask(h_NN, w_NK, sparsity: float):
    """Keep the largest |w|·√H_ii of each output; the ⌊s·N⌋ smallest go."""
    import torch

    score_NK = w_NK.abs() * h_NN.diagonal().sqrt()[:, None]
    pruned = int(sparsity * len(w_NK))
    mask_NK = torch.ones_like(w_NK, dtype=torch.bool)
    return mask_NK.scatter_(0, score_NK.topk(pruned, 0, largest=False).indices, False)


def extreme_eigenvalues(h_NN, damping: float, steps: int = 40) -> tuple[float, float]:
    """Smallest and largest eigenvalue of H + λI by (inverse) power iteration on a block, in float64: for large N.

    Rayleigh quotients: the smallest is a little too large and the largest a little too small, so κ is not overstated.
    """
    import torch

    a_NN = h_NN.to(torch.float64, copy=True)
    a_NN.diagonal().add_(damping * a_NN.diagonal().mean())
    factor_NN = torch.linalg.cholesky(a_NN)
    generator = torch.Generator(a_NN.device).manual_seed(0)
    start_NB = torch.randn(len(a_NN), 16, generator=generator, device=a_NN.device, dtype=a_NN.dtype)
    ends = []
    for apply in (lambda x_NB: torch.cholesky_solve(x_NB, factor_NN), lambda x_NB: a_NN @ x_NB):
        block_NB = start_NB
        for _ in range(steps):
            block_NB = torch.linalg.qr(apply(block_NB))[0]
        ends.append(torch.linalg.eigvalsh(block_NB.T @ a_NN @ block_NB))
    return float(ends[0][0]), float(ends[1][-1])


def from_file(path, columns: int | None = None, sparsity: float = 0.5):
    """H, W, mask as numpy arrays from an .npz with H (N, N) and W (N, K); Wanda mask."""
    data = np.load(path)
    return _masked(data["H"], data["W"][:, :columns], sparsity)


def from_fixture(path, sparsity: float = 0.5):
    """The same from an .npz of tests/fixtures/real, which holds the upper triangle of H."""
    data = np.load(path)
    w_NK = data["weights_NK"]
    h_NN = np.zeros((len(w_NK), len(w_NK)), dtype=np.float32)
    h_NN[np.triu_indices(len(w_NK))] = data["hessian_upper"]
    return _masked(h_NN + np.triu(h_NN, 1).T, w_NK, sparsity)


def _masked(h_NN: np.ndarray, w_NK: np.ndarray, sparsity: float):
    """H, W and Wanda's mask, ties to the lower input."""
    score_NK = np.abs(w_NK) * np.sqrt(h_NN.diagonal())[:, None]
    order_NK = np.argsort(score_NK, axis=0, kind="stable")
    mask_NK = np.ones(w_NK.shape, dtype=bool)
    np.put_along_axis(mask_NK, order_NK[: int(sparsity * len(w_NK))], False, axis=0)
    return h_NN, w_NK, mask_NK


LARGE = (
    Synthetic("4096x4096 easy 50%", 4096, 4096, 1.0, 0.5),
    Synthetic("4096x4096 hard 60%", 4096, 4096, 1.5, 0.6),
    Synthetic("4096x14336 easy 50%", 4096, 14336, 1.0, 0.5),
    Synthetic("14336x4096 easy 50%", 14336, 4096, 1.0, 0.5),
)
# For several solves with one H: few columns, as a search over masks has, so that the work on H itself shows.
REPEATED = (
    Synthetic("1024x256 easy 50%", 1024, 256, 1.0, 0.5),
    Synthetic("4096x256 easy 50%", 4096, 256, 1.0, 0.5),
)
