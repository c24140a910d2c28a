"""Masked ridge regression: against scikit-learn's Ridge on the kept inputs, and as scikit-learn's tools use it."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import qprecon
from qprecon import MaskedRidge

linear_model = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed: pip install 'qprecon[sklearn]'")


def data(rows=200, n=12, k=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, n)) + 3.0
    y = x @ rng.standard_normal((n, k)) + 5.0 + 0.3 * rng.standard_normal((rows, k))
    return x, y, rng.random((k, n)) < 0.6, rng.random(rows)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 300.0])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_output_is_a_ridge_regression_on_its_kept_inputs(alpha, intercept, weighted):
    x, y, mask, s = data()
    s = s if weighted else None
    for chosen in (mask, None):
        model = qprecon.fit(x, y, chosen, alpha=alpha, fit_intercept=intercept, sample_weight=s, tol=1e-12)
        assert model.solution_.optimal.all() and model.coef_.shape == (4, 12)
        for j in range(4):
            kept = mask[j] if chosen is not None else np.ones(12, dtype=bool)
            expected = linear_model.Ridge(alpha=alpha, fit_intercept=intercept).fit(x[:, kept], y[:, j], sample_weight=s)
            np.testing.assert_allclose(model.coef_[j, kept], expected.coef_, rtol=1e-6, atol=1e-8)
            assert (model.coef_[j, ~kept] == 0.0).all()
            assert np.broadcast_to(model.intercept_, 4)[j] == pytest.approx(expected.intercept_, rel=1e-6, abs=1e-7)


def test_the_objective_is_the_error_that_it_names():
    """f with its constant is Σ (y − ŷ)² + α‖C‖²: gaps are relative to that."""
    x, y, mask, _ = data()
    model = qprecon.fit(x, y, mask, alpha=2.0)
    error = ((y - model.predict(x)) ** 2).sum(0) + 2.0 * (model.coef_**2).sum(1)
    np.testing.assert_allclose(model.solution_.objective, error, rtol=1e-9)


def test_bounds():
    x, y, _, _ = data()
    model = qprecon.fit(x, y[:, :1], alpha=0.0, lower=0.0, backend="admm")
    expected = linear_model.LinearRegression(positive=True).fit(x, y[:, :1])
    np.testing.assert_allclose(model.coef_, expected.coef_, atol=1e-3)
    assert (model.coef_ >= 0.0).all()


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, list, "jax"])
def test_batches_and_kinds_of_arrays(kind):
    """The same coefficients from batches, and arrays of the kind that was given."""
    x, y, mask, _ = data()
    expected = qprecon.fit(x, y, mask)
    if kind == "jax":  # without its x64 switch in float32
        kind = pytest.importorskip("jax").numpy.asarray
        found = qprecon.fit(kind(x), kind(y), mask)
        assert type(found.coef_) is type(found.predict(kind(x))) is type(kind(x))
        np.testing.assert_allclose(found.coef_, expected.coef_, atol=1e-3)
        return
    if kind is list:
        found = qprecon.fit(((x[i : i + 30], y[i : i + 30]) for i in range(0, 200, 30)), mask=mask)
    else:
        found = qprecon.fit(kind(x), kind(y), mask)
        assert type(found.coef_) is type(kind(x)) and type(found.predict(kind(x))) is type(kind(x))
    np.testing.assert_allclose(np.asarray(found.coef_), expected.coef_, atol=1e-9)
    assert found.score(x, y) == pytest.approx(expected.score(x, y))


def test_one_output():
    x, y, mask, _ = data()
    model = MaskedRidge(mask[0]).fit(x, y[:, 0])
    assert model.coef_.shape == (12,) and isinstance(model.intercept_, float) and model.predict(x).shape == (200,)
    np.testing.assert_allclose(model.coef_, MaskedRidge(mask).fit(x, y).coef_[0], atol=1e-6)


def test_score_is_sklearns():
    from sklearn.metrics import r2_score

    x, y, mask, s = data()
    model = MaskedRidge(mask).fit(x, y)
    assert model.score(x, y, s) == pytest.approx(r2_score(y, model.predict(x), sample_weight=s))
    flat = np.column_stack([np.ones(200), y[:, 0]])
    model = MaskedRidge().fit(x, flat)
    assert model.score(x, flat) == pytest.approx(r2_score(flat, model.predict(x)))


@pytest.mark.filterwarnings("ignore:Estimator MaskedRidge does not inherit")
def test_scikit_learns_own_checks():
    from sklearn.utils.estimator_checks import check_estimator

    for model in (MaskedRidge(), MaskedRidge(alpha=0.1, fit_intercept=False, backend="cholesky")):
        results = check_estimator(model, on_fail=None, on_skip=None)
        assert [r for r in results if r["status"] not in ("passed", "skipped")] == [] and len(results) > 40


def test_in_a_pipeline_and_a_search():
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y, mask, _ = data()
    search = GridSearchCV(make_pipeline(StandardScaler(), MaskedRidge(mask)), {"maskedridge__alpha": [0.1, 1e4]})
    assert search.fit(x, y).best_params_ == {"maskedridge__alpha": 0.1}


def test_without_scikit_learn():
    """Nothing of it is imported, and what is wrong is still said."""
    code = """
import sys
import numpy as np, qprecon
class Refuses:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuses())
x, y = np.random.default_rng(0).standard_normal((50, 5)), np.ones((50, 2))
model = qprecon.MaskedRidge(alpha=0.5)
try:
    model.predict(x)
except AttributeError as error:
    assert "not fitted" in str(error)
model.fit(x.tolist(), y)
assert model.predict(x).shape == (50, 2) and model.score(x, y) <= 1.0 and "alpha=0.5" in repr(model)
for bad in (x[:, :3], x[0]):
    try:
        model.predict(bad)
        raise SystemExit("accepted")
    except ValueError as error:
        assert "X" in str(error)
assert not any(name.startswith("sklearn") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


BAD = [
    ({"mask": np.ones((12, 4))}, r"mask has shape \(12, 4\), coef_ is \(outputs, inputs\), here \(4, 12\); .*: give mask\.T$"),
    ({"mask": np.ones((5, 4))}, r"mask has shape \(5, 4\), coef_ is \(outputs, inputs\), here \(4, 12\)$"),
    ({"alpha": -1.0}, "alpha must be finite and not negative"),
    ({"alpha": np.nan}, "alpha must be finite and not negative, got nan"),
    ({"alpha": np.ones(4)}, "alpha must be a number"),
    ({"alpha": None}, "alpha must be a number, got None"),
    ({"alpha": "1"}, "alpha must be a number, got '1'"),
    ({"lower": np.zeros(3)}, "lower"),
    ({"lower": np.nan}, "lower or upper holds NaN, first for output 0"),
    ({"upper": np.where(np.arange(4) == 2, np.nan, 9.0)[:, None] * np.ones(12)}, "lower or upper holds NaN, first for output 2"),
    ({"solve_options": {"rhs": 1}}, "^solve_options: 'rhs' is what MaskedRidge hands .*; leave it out"),
    ({"solve_options": {"tol": 1e-3}}, "^solve_options: 'tol' .*; give tol=… itself"),
    ({"backend": "colesky"}, "cholesky"),
    ({"solve_options": {"bach_size": 3}}, "batch_size"),
]


@pytest.mark.parametrize(("given", "named"), BAD, ids=[named[:40] for _, named in BAD])
def test_what_is_refused_is_named(given, named):
    x, y, _, _ = data()
    with pytest.raises(ValueError, match=named):
        qprecon.fit(x, y, **given)


def test_an_argument_of_solve_is_told_where_it_goes():
    x, y, _, _ = data()
    with pytest.raises(TypeError, match="'time_limit'; arguments of qprecon.solve go into solve_options"):
        qprecon.fit(x, y, time_limit=1.0)


def test_outputs_that_are_not_certified_are_warned_of():
    x, y, mask, _ = data()
    with pytest.warns(UserWarning, match=r"4 of 4 outputs .*solution_"):
        qprecon.fit(x[:5], y[:5], mask, alpha=0.0)


def test_moments_that_do_not_fit():
    x, y, _, _ = data()
    with pytest.raises(ValueError, match="center=True"):
        MaskedRidge().fit_moments(qprecon.gram(x, y))
    with pytest.raises(ValueError, match="no rhs"):
        MaskedRidge().fit_moments(qprecon.gram(x, center=True))
    with pytest.raises(ValueError, match="invalid parameter 'mas'"):
        MaskedRidge().set_params(mas=None)


@pytest.mark.parametrize("how", ["fit", "MaskedRidge", "without scikit-learn"])
@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_table_keeps_the_names_of_its_columns(how, library, monkeypatch):
    """Columns in another order gave wrong predictions in silence."""
    tables = pytest.importorskip(library)
    x, y, mask, _ = data(n=3)
    table = tables.DataFrame({name: x[:, place] for place, name in enumerate("abc")})
    if how == "without scikit-learn":
        for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
            monkeypatch.delitem(sys.modules, name)
    model = qprecon.fit(table, y, mask) if how == "fit" else MaskedRidge(mask).fit(table, y)
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    np.testing.assert_allclose(model.predict(table), model.predict(np.asarray(table)))
    for wrong in (["c", "b", "a"], ["a", "b", "d"]):
        renamed = tables.DataFrame({name: x[:, place] for place, name in enumerate(wrong)})
        with pytest.raises(ValueError, match="feature names should match"):
            model.predict(renamed)
    assert not hasattr(model.fit(x, y), "feature_names_in_")
