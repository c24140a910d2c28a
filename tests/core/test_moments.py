"""Gram matrices from data: against sums in extended precision, in any pieces and of any kind of array, and what is refused."""

import numpy as np
import pytest
import torch

import qprecon
from qprecon.arrays.interop import to_numpy
from qprecon.data import moments, sums

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = [np.asarray, torch.from_numpy, pytest.param(lambda a: torch.from_numpy(a).cuda(), id="cuda", marks=GPU)]


def data(rows=300, n=13, k=3, mean=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, n)) + mean, rng.standard_normal((rows, k)) + mean, rng.random(rows)


def exact(x, y, s, center):
    """H, rhs, constant in extended precision."""
    x, y, s = (a.astype(np.longdouble) for a in (x, y, s))
    if center:
        x, y = x - s @ x / s.sum(), y - s @ y / s.sum()
    return x.T @ (s[:, None] * x), x.T @ (s[:, None] * y), (s[:, None] * y * y).sum(0)


def off(found, expected):
    """The largest errors of the three, relative to the largest entry of each."""
    parts = (found.H, found.rhs, found.constant)
    return max(float(abs(to_numpy(a) - b).max() / abs(b).max()) for a, b in zip(parts, expected, strict=True))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_sums_are_those_of_all_rows(center, weighted, kind, size):
    x, y, s = data()
    given = (x, y, s) if weighted else (x, y)
    batches = [tuple(kind(a[first : first + size]) for a in given) for first in range(0, 300, size)]
    found = qprecon.gram(iter(batches), center=center)
    assert off(found, exact(x, y, s if weighted else np.ones(300), center)) < 1e-13
    assert found.count == 300 and found.weight == pytest.approx(s.sum() if weighted else 300)
    assert type(found.H) is type(batches[0][0]) and (found.H == found.H.T).all()
    if center:
        mean = np.average(x, axis=0, weights=s if weighted else None)
        np.testing.assert_allclose(to_numpy(found.x_mean), mean, atol=1e-13)
        np.testing.assert_allclose(to_numpy(found.y_mean), np.average(y, axis=0, weights=s if weighted else None), atol=1e-13)
    else:
        assert found.x_mean is None and found.y_mean is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 5, 300, 2 * sums._MIRRORED + 3])
def test_the_lower_triangle_is_the_upper_one(kind, size):
    """Whatever a processor's product left there."""
    whole_NN = np.random.default_rng(0).standard_normal((size, size))
    found_NN = kind(whole_NN.copy())
    sums.mirror(found_NN)
    np.testing.assert_array_equal(to_numpy(found_NN), np.triu(whole_NN) + np.triu(whole_NN, 1).T)


def test_large_means_cost_few_digits():
    """With means of 1e6 the difference of two sums would keep four digits."""
    x, y, _ = data(mean=1e6)
    batches = [(x[first : first + 40], y[first : first + 40]) for first in range(0, 300, 40)]
    assert off(qprecon.gram(batches, center=True), exact(x, y, np.ones(300), True)) < 1e-8


def test_pieces_of_one_array(monkeypatch):
    monkeypatch.setattr(moments, "_ENTRIES", 13 * 11)
    monkeypatch.setattr(moments, "MANY_ROWS", 64)
    sizes, add = [], moments._Sums.add
    monkeypatch.setattr(moments._Sums, "add", lambda self, x, *more: (sizes.append(len(x)), add(self, x, *more))[1])
    x, y, s = data()
    assert off(qprecon.gram(x, y, weights=s, center=True), exact(x, y, s, True)) < 1e-13
    assert max(sizes) == 11 and sum(sizes) == 300


@pytest.mark.parametrize("dtype", ["float16", "float32", "int16", "uint8", ">f4"])
def test_memmaps_of_any_dtype(dtype, tmp_path):
    x = (10 * abs(data()[0])).astype(dtype)
    stored = np.memmap(tmp_path / "x", dtype=dtype, mode="w+", shape=x.shape)
    stored[:] = x
    found = qprecon.gram(stored)
    wide = x.astype(np.longdouble)
    assert found.rhs is None and found.constant is None and found.H.dtype == np.float64
    np.testing.assert_allclose(found.H, (wide.T @ wide).astype(np.float64), rtol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_other_shapes_and_float32(kind):
    x, y, _ = data()
    found = qprecon.gram(kind(x.reshape(5, 60, 13)), kind(y.reshape(5, 60, 3)), dtype="float32")
    assert str(found.H.dtype).endswith("float32") and off(found, exact(x, y, np.ones(300), False)) < 1e-5
    one = qprecon.gram(kind(x), kind(y[:, 0]))
    assert one.rhs.shape == (13, 1) and one.constant.shape == (1,)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_in_float32(device, dtype):
    """Products are exact in float32, so that only sums round; a GPU's tensor cores cut them off (`hessian.ENTRY`)."""
    x = torch.from_numpy(data(rows=5000)[0]).to(dtype)
    found, wide = to_numpy(qprecon.gram(x.to(device), dtype="float32").H), x.double().numpy()
    expected = wide.T @ wide
    scale = np.sqrt(np.outer(expected.diagonal(), expected.diagonal()))
    assert (abs(found - expected) / scale).max() < 128 * 2.0**-24


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    x, y, _ = data()
    found = qprecon.gram(jax.numpy.asarray(x), jax.numpy.asarray(y))
    assert isinstance(found.H, jax.Array) and off(found, exact(x, y, np.ones(300), False)) < 1e-5


def test_float64_sums_of_float32_rows_are_certified_without_damping():
    """H is then known to float64: the reason for the default."""
    x, _, _ = data(rows=4000, n=32)
    x = x.astype(np.float32)
    w = np.random.default_rng(1).standard_normal((32, 4))
    mask = np.random.default_rng(2).random((32, 4)) < 0.5
    assert qprecon.solve(qprecon.gram(x).H, w, mask, tol=1e-9).optimal.all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("host", [6, 100])
def test_the_triangles(library, dtype, host, monkeypatch):
    """`add_gram` may leave the lower triangle; `mirror` fills it, whatever the panels."""
    monkeypatch.setattr(sums, "_MIRRORED", 5)
    monkeypatch.setattr(sums, "PANELS_FROM", 6)
    monkeypatch.setattr(sums, "HOST_PANELS_FROM", host)
    x = data()[0].astype(dtype)
    h = np.zeros((13, 13), dtype) if library == "numpy" else torch.zeros(13, 13, dtype=getattr(torch, dtype))
    for rows in (x[:100], x[100:]):
        sums.add_gram(h, rows if library == "numpy" else torch.from_numpy(rows))
    sums.mirror(h)
    expected = x.T.astype(np.float64) @ x.astype(np.float64)
    assert abs(np.asarray(h) - expected).max() < (1e-3 if dtype == "float32" else 1e-12)


X, Y, S = data(rows=20)
NAN = np.where(np.arange(20)[:, None] == 3, np.nan, X)
BAD = [
    ((X, Y[:5]), {}, "Y has shape"),
    (([X, X[:, :5]],), {}, "batch 1.*5 columns, the first batch has 13"),
    (([(X, Y), X],), {}, "batch 1: Y has none"),
    (([X, NAN],), {}, "batch 1: NaN"),
    ((NAN,), {"center": True}, "NaN"),
    ((X, np.where(Y > 1, np.inf, Y)), {}, "NaN or Inf"),
    (((X, Y),), {}, "tuple"),
    (([X],), {"Y": Y}, "read as batches, tuples"),
    (([],), {}, "no rows"),
    ((X[:0],), {}, "no rows"),
    ((X[0],), {}, r"X must be \(T, N\)"),
    ((X,), {"weights": -S}, "negative"),
    ((X,), {"weights": S[:5]}, "weights have shape"),
    ((X,), {"weights": 0 * S}, "all zero"),
    ((X,), {"weights": np.where(np.arange(20) == 3, np.nan, S)}, "NaN or Inf"),
    ((X + 0j,), {}, "X must be an array of real numbers"),
    ((None,), {}, "X must be an array or an iterable of batches, got None"),
    (("X.npy",), {}, "iterable of batches, got a str"),
    (({"x": X},), {}, "iterable of batches, got a dict"),
    ((X.tolist(),), {}, r"give np\.asarray\(X\)"),
    ((X,), {"dtype": "float16"}, "dtype"),
    ((1e30 * X,), {"dtype": "float32"}, "squares leave float32"),
    (([(X, Y, S, S)],), {}, "4 parts"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("args", "more", "named"), BAD, ids=[named for *_, named in BAD])
def test_what_is_refused_is_named(args, more, named):
    with pytest.raises(ValueError, match=named):
        qprecon.gram(*args, **more)


def test_nothing_to_predict_and_nothing_to_predict_from():
    assert qprecon.fit(X, Y[:, :0], np.ones((0, X.shape[1]), dtype=bool)).coef_.shape == (0, X.shape[1])
    with pytest.raises(ValueError, match="X has no inputs"):
        qprecon.gram(X[:, :0])


def test_a_data_set_that_only_knows_its_items_is_taken():
    class Items:
        def __getitem__(self, index):
            if index == 2:
                raise IndexError
            return X[10 * index : 10 * index + 10]

    np.testing.assert_allclose(qprecon.gram(Items()).H, X.T @ X)


def test_sparse_is_refused():
    import scipy.sparse

    with pytest.raises(ValueError, match="X is sparse"):
        qprecon.gram(scipy.sparse.csr_array(X))


def test_sums_are_shown_by_their_shapes_and_not_taken_for_h():
    x_TN, y_TK = np.arange(12.0).reshape(4, 3), np.ones((4, 2))
    moments = qprecon.gram(x_TN, y_TK, center=True)
    assert repr(moments) == "Moments(H (3, 3), rhs (3, 2), constant (2,), x_mean (3,), y_mean (2,), 4 rows of weight 4)"
    assert repr(qprecon.gram(x_TN[:1])) == "Moments(H (3, 3), 1 row of weight 1)"
    for call in (lambda: qprecon.solve(moments, y_TK[:3], y_TK[:3]), lambda: qprecon.prepare(moments)):
        with pytest.raises(ValueError, match=r"H must be an array, got a Moments: give its H, moments\.H"):
            call()


def test_lists_are_read_as_batches():
    with pytest.raises(ValueError, match="anything else is read as batches, tuples"):
        qprecon.gram([[1.0, 2.0], [3.0, 4.0]], [[1.0], [2.0]])
