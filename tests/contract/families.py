"""Named families of problems, deterministic functions without arguments. Most share one shape, so that jit compiles once."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

REAL = pathlib.Path(__file__).parents[1] / "fixtures" / "real"
N, K = 64, 6


@dataclass(frozen=True, eq=False)
class Problem:
    """The arguments of ``qprecon.solve``, float64 numpy; ``about`` says what is known of the family."""

    hessian_NN: np.ndarray
    weights_NK: np.ndarray
    mask_NK: np.ndarray
    rhs_NK: np.ndarray | None = None
    lower: Any = None
    upper: Any = None
    damping: float = 0.0

    @property
    def has_bounds(self) -> bool:
        """Whether kept entries are bounded."""
        return self.lower is not None or self.upper is not None

    def arguments(self, dtype: str = "float64") -> dict[str, Any]:
        """Keyword arguments for ``qprecon.solve``, arrays in ``dtype``."""
        put = lambda x: None if x is None else np.asarray(x, dtype=dtype)  # noqa: E731
        return {
            "H": put(self.hessian_NN),
            "W": put(self.weights_NK),
            "mask": self.mask_NK,
            "rhs": put(self.rhs_NK),
            "lower": put(self.lower),
            "upper": put(self.upper),
            "damping": self.damping,
        }

    def rounded(self, dtype: str) -> Problem:
        """The problem that a caller with arrays in ``dtype`` poses, in float64: what references must solve."""
        put = lambda x: None if x is None else np.asarray(x, dtype=dtype).astype(np.float64)  # noqa: E731
        return Problem(
            put(self.hessian_NN),
            put(self.weights_NK),
            self.mask_NK,
            put(self.rhs_NK),
            put(self.lower),
            put(self.upper),
            self.damping,
        )


@dataclass(frozen=True)
class Family:
    """A named problem. ``small``: cheap enough for the slow backends."""

    name: str
    build: Callable[[], Problem]
    small: bool = True


FAMILIES: dict[str, Family] = {}


def family(small: bool = True) -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    """Register a function as the family of its name."""

    def register(build: Callable[[], Problem]) -> Callable[[], Problem]:
        cached = functools.cache(build)
        FAMILIES[build.__name__] = Family(build.__name__, cached, small)
        return cached

    return register


def gram(rng: np.random.Generator, n: int = N, tokens: int = 512) -> np.ndarray:
    """XᵀX / tokens of correlated activations: mean diagonal about 1."""
    x_TN = rng.standard_normal((tokens, n)) + 0.5 * rng.standard_normal((tokens, 1))
    return x_TN.T @ x_TN / tokens


def conditioned(rng: np.random.Generator, kappa: float, n: int = N) -> np.ndarray:
    """Eigenvalues from 1 to 1/kappa, evenly in the logarithm, in random directions."""
    q_NN, _ = np.linalg.qr(rng.standard_normal((n, n)))
    h_NN = (q_NN * np.logspace(0.0, -np.log10(kappa), n)) @ q_NN.T
    return 0.5 * (h_NN + h_NN.T)


def wanda(h_NN: np.ndarray, w_NK: np.ndarray, sparsity: float = 0.5) -> np.ndarray:
    """Keep the largest |w|·√H_ii of each column."""
    score_NK = np.abs(w_NK) * np.sqrt(np.diag(h_NN))[:, None]
    pruned = int(sparsity * len(h_NN))
    order_NK = np.argsort(score_NK, axis=0, kind="stable")
    mask_NK = np.ones(w_NK.shape, dtype=bool)
    np.put_along_axis(mask_NK, order_NK[:pruned], False, axis=0)
    return mask_NK


def weights(rng: np.random.Generator, n: int = N, k: int = K) -> np.ndarray:
    """Dense weights of unit size."""
    return rng.standard_normal((n, k))


def _plain(seed: int, damping: float = 0.01, sparsity: float = 0.5) -> Problem:
    rng = np.random.default_rng(seed)
    h_NN, w_NK = gram(rng), weights(rng)
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK, sparsity), damping=damping)


@family()
def well_conditioned() -> Problem:
    """The easy one."""
    return _plain(1)


@family()
def well_conditioned_undamped() -> Problem:
    """λ_min is not given but must be found."""
    return _plain(2, damping=0.0)


@family()
def sparsity_10() -> Problem:
    """Nearly everything kept."""
    return _plain(3, sparsity=0.1)


@family()
def sparsity_90() -> Problem:
    """Nearly everything pruned."""
    return _plain(4, sparsity=0.9)


@family()
def two_of_four() -> Problem:
    """2:4 along the inputs."""
    problem = _plain(5)
    score_GMK = np.abs(problem.weights_NK).reshape(N // 4, 4, K)
    mask_NK = (score_GMK.argsort(1).argsort(1) >= 2).reshape(N, K)
    return dataclasses.replace(problem, mask_NK=mask_NK)


@family()
def outlier_channels() -> Problem:
    """Four inputs 300 times as large as the others, damped."""
    return _outliers(0.01)


@family()
def outlier_channels_undamped() -> Problem:
    """The same without damping."""
    return _outliers(0.0)


def _outliers(damping: float) -> Problem:
    rng = np.random.default_rng(6)
    scale_N = np.ones(N)
    scale_N[[3, 17, 40, 41]] = 300.0
    h_NN, w_NK = gram(rng) * scale_N[:, None] * scale_N, weights(rng)
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK), damping=damping)


@family()
def kappa_1e4() -> Problem:
    """Condition number 1e4, undamped."""
    return _kappa(1e4)


@family()
def kappa_1e6() -> Problem:
    """Condition number 1e6, undamped."""
    return _kappa(1e6)


@family()
def kappa_1e8() -> Problem:
    """Condition number 1e8, undamped."""
    return _kappa(1e8)


@family()
def kappa_1e8_damped() -> Problem:
    """The spectrum of ``kappa_1e8`` with the usual damping."""
    return dataclasses.replace(_kappa(1e8), damping=0.01)


def _kappa(kappa: float) -> Problem:
    rng = np.random.default_rng(7)
    w_NK = weights(rng)
    return Problem(conditioned(rng, kappa), w_NK, rng.random((N, K)) < 0.5)


@family()
def singular_half_rank() -> Problem:
    """Rank 40 of 64 with 32 kept: H is singular, every kept block is not, so each column is certified by its own factor."""
    rng = np.random.default_rng(8)
    h_NN, w_NK = gram(rng, tokens=40), weights(rng)
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK))


@family(small=False)
def rank_8_of_256() -> Problem:
    """Kept inputs reproduce the outputs exactly: f* = 0."""
    rng = np.random.default_rng(9)
    h_NN, w_NK = gram(rng, 256, 8), weights(rng, 256)
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK))


@family(small=False)
def rank_8_of_256_few_kept() -> Problem:
    """Four of 256 inputs kept: f* > 0 and kept blocks of full rank."""
    problem = rank_8_of_256()
    return dataclasses.replace(problem, mask_NK=wanda(problem.hessian_NN, problem.weights_NK, 252 / 256))


@family(small=False)
def rank_8_of_256_damped() -> Problem:
    """The damping is all that makes it definite."""
    return dataclasses.replace(rank_8_of_256(), damping=0.01)


@family()
def duplicate_inputs() -> Problem:
    """Every kept input occurs twice: kept blocks are singular although f* > 0."""
    rng = np.random.default_rng(10)
    x_TN = rng.standard_normal((512, N))
    x_TN[:, 1::2] = x_TN[:, ::2]
    mask_NK = np.repeat(rng.random((N // 2, K)) < 0.5, 2, axis=0)
    return Problem(x_TN.T @ x_TN / 512, weights(rng), mask_NK)


@family()
def dead_inputs() -> Problem:
    """Seven inputs that are always zero, some kept, some pruned; undamped."""
    return _dead(0.0)


@family()
def dead_inputs_damped() -> Problem:
    """The same with the usual damping."""
    return _dead(0.01)


def _dead(damping: float) -> Problem:
    rng = np.random.default_rng(11)
    x_TN = rng.standard_normal((512, N))
    x_TN[:, [0, 5, 6, 31, 32, 50, 63]] = 0.0
    return Problem(x_TN.T @ x_TN / 512, weights(rng), rng.random((N, K)) < 0.5, damping=damping)


@family()
def zero_hessian() -> Problem:
    """No activation at all: everything costs nothing."""
    rng = np.random.default_rng(12)
    return Problem(np.zeros((N, N)), weights(rng), rng.random((N, K)) < 0.5)


@family()
def zero_column() -> Problem:
    """A column of zero weights between others: f = f_start = 0 there."""
    problem = _plain(13)
    w_NK = problem.weights_NK.copy()
    w_NK[:, 2] = 0.0
    return dataclasses.replace(problem, weights_NK=w_NK)


@family()
def all_kept() -> Problem:
    """Nothing to do."""
    return dataclasses.replace(_plain(14), mask_NK=np.ones((N, K), dtype=bool))


@family()
def all_pruned() -> Problem:
    """Nothing can be done."""
    return dataclasses.replace(_plain(15), mask_NK=np.zeros((N, K), dtype=bool))


@family()
def kept_and_pruned_columns() -> Problem:
    """A column all kept and one all pruned beside ordinary ones."""
    problem = _plain(16)
    mask_NK = problem.mask_NK.copy()
    mask_NK[:, 1], mask_NK[:, 4] = True, False
    return dataclasses.replace(problem, mask_NK=mask_NK)


@family()
def no_columns() -> Problem:
    """K = 0."""
    problem = _plain(17)
    return dataclasses.replace(problem, weights_NK=problem.weights_NK[:, :0], mask_NK=problem.mask_NK[:, :0])


@family()
def one_input() -> Problem:
    """N = 1: one column kept, one pruned, one zero."""
    return Problem(np.array([[2.0]]), np.array([[1.0, -3.0, 0.0]]), np.array([[True, False, False]]), damping=0.01)


@family()
def hessian_1e_8() -> Problem:
    """mean(diag H) = 1e-8."""
    return _scaled(1e-8, 1.0)


@family()
def hessian_1e8() -> Problem:
    """mean(diag H) = 1e8."""
    return _scaled(1e8, 1.0)


@family()
def weights_1e_4() -> Problem:
    """Weights of 1e-4."""
    return _scaled(1.0, 1e-4)


@family()
def weights_1e2() -> Problem:
    """Weights of 1e2."""
    return _scaled(1.0, 1e2)


@family()
def hessian_1e_8_weights_1e_4() -> Problem:
    """Both tiny: objectives near 1e-15."""
    return _scaled(1e-8, 1e-4)


@family()
def hessian_1e8_weights_1e2() -> Problem:
    """Both large: objectives near 1e13."""
    return _scaled(1e8, 1e2)


def _scaled(hessian_scale: float, weight_scale: float) -> Problem:
    problem = _plain(18)
    factor = hessian_scale / np.diag(problem.hessian_NN).mean()
    return dataclasses.replace(problem, hessian_NN=problem.hessian_NN * factor, weights_NK=problem.weights_NK * weight_scale)


@family()
def uneven_columns() -> Problem:
    """Columns six orders of magnitude apart."""
    problem = _plain(19)
    return dataclasses.replace(problem, weights_NK=problem.weights_NK * np.logspace(-3, 3, K))


@family()
def rhs_of_dense_model() -> Problem:
    """b = X̃ᵀ(Xw) with X̃ = X + noise: repair what arrives from the layers before."""
    return _rhs(0.01)


@family()
def rhs_of_dense_model_undamped() -> Problem:
    """The same without damping."""
    return _rhs(0.0)


def _rhs(damping: float) -> Problem:
    rng = np.random.default_rng(20)
    x_TN, w_NK = rng.standard_normal((512, N)), weights(rng)
    noisy_TN = x_TN + 0.3 * rng.standard_normal((512, N))
    h_NN = noisy_TN.T @ noisy_TN / 512
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK), rhs_NK=noisy_TN.T @ (x_TN @ w_NK) / 512, damping=damping)


@family()
def rhs_unrelated() -> Problem:
    """b has nothing to do with Hw; one column of it is zero."""
    problem = _plain(21)
    rhs_NK = np.random.default_rng(22).standard_normal((N, K))
    rhs_NK[:, 3] = 0.0
    return dataclasses.replace(problem, rhs_NK=rhs_NK)


@family()
def bounds_active() -> Problem:
    """Clipping to ±0.7, which the dense weights and the optimum pass."""
    return dataclasses.replace(_plain(23), lower=-0.7, upper=0.7)


@family()
def bounds_keep_signs() -> Problem:
    """One-sided, one array a side: the new weights keep the dense ones' signs."""
    problem = _plain(24)
    w_NK = problem.weights_NK
    return dataclasses.replace(problem, lower=np.where(w_NK > 0, 0.0, -np.inf), upper=np.where(w_NK > 0, np.inf, 0.0))


@family()
def bounds_away_from_zero() -> Problem:
    """Only a lower bound, above zero: pruned entries stay 0 although it excludes them."""
    return dataclasses.replace(_plain(25), lower=0.1)


@family()
def bounds_equal() -> Problem:
    """Some kept entries are held at a value by lower = upper; the first column wholly."""
    problem = _plain(26)
    held_NK = np.random.default_rng(27).random((N, K)) < 0.3
    held_NK[:, 0] = True
    return dataclasses.replace(problem, lower=np.where(held_NK, 0.25, -1.0), upper=np.where(held_NK, 0.25, 1.0))


@family()
def bounds_inactive() -> Problem:
    """Wide bounds change nothing."""
    return dataclasses.replace(_plain(28), lower=-1e3, upper=1e3)


@family()
def bounds_and_rhs() -> Problem:
    """Bounds with an explicit rhs, undamped."""
    return dataclasses.replace(_rhs(0.0), lower=-0.6, upper=np.full((N, 1), 0.8))


def real_layers() -> list[str]:
    """Names of the committed real layers."""
    return sorted(path.stem for path in REAL.glob("*.npz"))


def real_layer(name: str) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """H (N, N), 24 columns of W (N, 24), float64, and what they were made from."""
    with np.load(REAL / f"{name}.npz") as data:
        w_NK = data["weights_NK"].astype(np.float64)
        h_NN = np.zeros((len(w_NK), len(w_NK)))
        h_NN[np.triu_indices(len(w_NK))] = data["hessian_upper"]
        about = json.loads(str(data["about"]))
    return h_NN + np.triu(h_NN, 1).T, w_NK, about


def real_problem(name: str, columns: int = 8, damping: float = 0.01) -> Problem:
    """A real layer with a 50 % Wanda mask."""
    h_NN, w_NK, _ = real_layer(name)
    w_NK = w_NK[:, :: w_NK.shape[1] // columns]
    return Problem(h_NN, w_NK, wanda(h_NN, w_NK), damping=damping)


def _register_real() -> None:
    for name in real_layers():
        for suffix, damping in (("", 0.01), ("_undamped", 0.0)):
            full = f"real_{name}{suffix}"
            build = functools.cache(functools.partial(real_problem, name, damping=damping))
            FAMILIES[full] = Family(full, build, small=False)


_register_real()
