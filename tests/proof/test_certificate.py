"""What the certificate assumes and proves, each held against exact arithmetic or a measurement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import qprecon
from qprecon.problem.hessian import ENTRY
from qprecon.proof.factor import Certificate, certificate
from tests.contract.families import FAMILIES
from tests.fuzz.exact import Exact, quadratic_gain


def of(h_NN: np.ndarray, damping: float = 0.0) -> Certificate:
    """The certificate of an H alone."""
    n = len(h_NN)
    return certificate(qprecon.ColumnQP(h_NN, np.ones((n, 1)), np.ones((n, 1), dtype=bool), damping=damping).hessian)


def hessian(kind: str, n: int = 16) -> np.ndarray:
    """A few that a factor below exists of."""
    rng = np.random.default_rng(0)
    x_TN = rng.standard_normal((4 * n, n))
    if kind == "one huge channel":
        x_TN[:, 3] *= 1e6
    if kind == "any scales":
        x_TN *= 10.0 ** rng.uniform(-10, 10, n)
    if kind == "near duplicates":
        x_TN[:, 1] = x_TN[:, 0] + 1e-4 * rng.standard_normal(4 * n)
    if kind == "float32":
        x_TN = x_TN.astype(np.float32)
    return x_TN.T @ x_TN


KINDS = ("ordinary", "one huge channel", "any scales", "near duplicates", "float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damping", [0.0, 1e-9, 0.01])
def test_the_factor_is_below(kind: str, damping: float) -> None:
    """A − LLᵀ is positive semidefinite in exact arithmetic, and the condition bounds what it is said to, at its worst x."""
    h_NN = hessian(kind)
    found = of(h_NN, damping)
    ridge = damping * float(h_NN.diagonal().astype(np.float64).mean())
    a_NN, l_NN = Exact.of(h_NN).plus_diagonal(ridge), Exact.of(np.tril(found.factor_NN))
    product_NN = l_NN @ Exact(l_NN.ints.T, l_NN.exponent)
    nothing_N = Exact.of(np.zeros(len(h_NN)))
    assert quadratic_gain(a_NN - product_NN, nothing_N) == 0, "an indefinite difference gives None"
    # sup (rootᵀ|x|)² / xᵀAx is at least rootᵀA⁻¹root
    root_N = np.sqrt(h_NN.diagonal().astype(np.float64) + ridge)
    assert float(quadratic_gain(a_NN, Exact.of(root_N))) <= found.condition


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_the_inputs_do_not_matter(kind: str) -> None:
    """Scaling inputs by powers of two scales the factor's rows and nothing else."""
    h_NN = hessian(kind)
    scale_N = np.exp2(np.random.default_rng(1).integers(-20, 20, len(h_NN))).astype(h_NN.dtype)
    one, other = of(h_NN), of(h_NN * scale_N[:, None] * scale_N)
    assert one.condition == other.condition
    np.testing.assert_array_equal(np.tril(other.factor_NN), np.tril(one.factor_NN) * scale_N[:, None])


def test_damping_decides_the_shift() -> None:
    """The usual damping takes one factorisation, of A − λ/16; without damping the steps of a ladder are tried."""
    h_NN = hessian("ordinary")
    ridge = 0.01 * float(h_NN.diagonal().mean())
    n = len(h_NN)
    shifted_NN = h_NN + (ridge - ridge / 16.0) * np.eye(n)
    np.testing.assert_allclose(np.tril(of(h_NN, 0.01).factor_NN), np.linalg.cholesky(shifted_NN), rtol=1e-12)


@pytest.mark.parametrize("entry", [1.0, 1e-3, 1e-12])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_zero_on_the_diagonal_with_something_beside_it(kind: str, entry: float) -> None:
    """[[0, c], [c, h]] has a negative eigenvalue however small c is."""
    h_NN = hessian("ordinary")
    h_NN[2], h_NN[:, 2] = 0.0, 0.0
    assert of(h_NN).factor_NN is not None
    h_NN[2, 5] = h_NN[5, 2] = entry
    given = h_NN if kind == "numpy" else torch.from_numpy(h_NN)
    with pytest.raises(ValueError, match="^H is clearly indefinite"):
        qprecon.solve(given, np.ones((16, 1)), np.ones((16, 1), dtype=bool))


def test_what_an_entry_is_known_to() -> None:
    """float32 by its dtype, and where float32 sums were widened; float64 otherwise."""
    single, double = ENTRY * 2.0**-24, ENTRY * 2.0**-53
    h_NN = hessian("float32")
    assert of(h_NN).entry == of(h_NN.astype(np.float64)).entry == single
    lower_NN = np.tril(np.full(h_NN.shape, 1e-6), -1).astype(np.float32) * h_NN
    assert of((h_NN + lower_NN).astype(np.float64)).entry == single, "not quite symmetric: the mean of two is taken"
    assert of(hessian("ordinary")).entry == double
    problem = qprecon.ColumnQP(torch.from_numpy(h_NN).double(), torch.ones(16, 1), torch.ones(16, 1, dtype=torch.bool))
    assert certificate(problem.hessian).entry == single


CHANNELS = {
    "plain": lambda x_TN: x_TN,
    "with a mean": lambda x_TN: x_TN + 3.0,
    "positive": abs,
    "a large channel": lambda x_TN: x_TN * np.where(np.arange(x_TN.shape[1]) == 3, 300.0, 1.0).astype(np.float32),
    "a large token": lambda x_TN: np.where(np.arange(len(x_TN))[:, None] == 0, 1e3, x_TN).astype(np.float32),
}


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("tokens", [64, 1024, 16384, 262144])
@pytest.mark.parametrize("how", ["numpy", "torch", "torch in batches"])
def test_float32_sums_are_as_good_as_assumed(channels: str, tokens: int, how: str) -> None:
    """|E_ij| ≤ ENTRY · 2⁻²⁴ · √(H_ii H_jj) for XᵀX summed in float32, measured in float64."""
    x_TN = CHANNELS[channels](np.random.default_rng(tokens).standard_normal((tokens, 32), dtype=np.float32)).astype(np.float32)
    if how == "numpy":
        h_NN = x_TN.T @ x_TN
    else:
        total = torch.zeros(32, 32)
        for part in torch.from_numpy(x_TN).split(tokens if how == "torch" else 512):
            total.addmm_(part.T, part)
        h_NN = total.numpy()
    exact_NN = x_TN.astype(np.float64).T @ x_TN.astype(np.float64)
    root_N = np.sqrt(exact_NN.diagonal())
    assert (np.abs(h_NN - exact_NN) / root_N[:, None] / root_N).max() <= ENTRY * 2.0**-24


def test_singular_to_working_precision() -> None:
    """No factor of a singular H; whether it is semidefinite but for float64's rounding is known all the same."""
    singular = of(FAMILIES["rank_8_of_256"].build().hessian_NN)
    assert singular.factor_NN is None and singular.semidefinite
    stored = of(FAMILIES["rank_8_of_256"].build().hessian_NN.astype(np.float32))
    assert stored.factor_NN is None and not stored.semidefinite
