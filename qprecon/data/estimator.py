"""Masked ridge regression of many outputs at once, with scikit-learn's conventions, and without needing scikit-learn.

    model = qprecon.fit(X, Y, mask, alpha=1.0)
    model.coef_, model.intercept_, model.predict(X), model.solution_.relative_gap

It minimises Σ_t s_t ‖y_t − Cx_t − c‖² + α‖C‖² with C = 0 where the mask is 0: a quadratic program for each output, all with one H.
With a mask of ones it is scikit-learn's ``Ridge``.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..arrays.interop import Array, cast, dtype_name, from_core, is_sparse, kind_of, place_of, to_core, to_numpy
from ..contract.options import as_number
from ..prepared import prepare
from ..problem.hessian import mean_diagonal
from ..status import Status
from ..wording import counted
from .moments import Moments, gram

_SET_HERE = {"W", "mask", "backend", "rhs", "constant", "lower", "upper", "tol", "dtype"}  # arguments of a solve


class MaskedRidge:
    """Ridge regression in which a mask says which coefficients may differ from zero. It works with scikit-learn's tools.

    Args:
        mask: (outputs, inputs), the shape of ``coef_``: 1 or True where a coefficient may differ from 0. (inputs,) for a single
            output. None: everywhere. ``qprecon.solve`` has (inputs, outputs): give the transpose of such a mask. With as many
            outputs as inputs no shape tells the one from the other, and a mask the wrong way round is taken as it is.
        alpha: α ≥ 0, as ``Ridge`` has it: beside Σ s_t ‖y_t − ŷ_t‖², not beside the mean.
        fit_intercept: also fit a constant for each output; neither masked nor shrunk.
        lower, upper: bounds on the coefficients that the mask keeps, scalars or (outputs, inputs) as the mask.
        backend, tol, solve_options: as in ``qprecon.solve``. Coefficients are off by about √tol of the error that remains.

    Attributes:
        coef_: (outputs, inputs), or (inputs,) for a Y of one dimension; exactly 0 where the mask is.
        intercept_: (outputs,), a float for a Y of one dimension; 0.0 without an intercept.
        solution_: the ``Solution``, with a certificate for each output. Its weights are the transpose of ``coef_``.
        n_features_in_, feature_names_in_: as in scikit-learn; names only where X is a table whose columns all have some.
    """

    def __init__(
        self,
        mask: Any = None,
        *,
        alpha: float = 1.0,
        fit_intercept: bool = True,
        lower: Any = None,
        upper: Any = None,
        backend: str = "auto",
        tol: float = 1e-8,
        solve_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.mask = mask
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.lower = lower
        self.upper = upper
        self.backend = backend
        self.tol = tol
        self.solve_options = solve_options

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> MaskedRidge:
        """Fit to X (T, inputs) and y (T, outputs) or (T,); rows count ``sample_weight`` times, (T,).

        Raises:
            ValueError: shapes or values that cannot be; the argument is named.
        """
        X, y = self._checked(X, y, reset=True)
        if sample_weight is not None and not hasattr(sample_weight, "device"):  # an array that is not numpy's, a list, a number
            sample_weight = np.asarray(sample_weight, dtype=np.float64)
            sample_weight = np.full(len(X), sample_weight) if sample_weight.ndim == 0 else sample_weight
        return self.fit_moments(gram(X, y, weights=sample_weight, center=self.fit_intercept), single=y.ndim == 1)

    def fit_moments(self, moments: Moments, *, single: bool = False) -> MaskedRidge:
        """Fit to what ``qprecon.gram`` summed, ``center`` as ``fit_intercept``; ``single``: one output, without an axis for it."""
        if moments.rhs is None:
            raise ValueError("moments have no rhs: give gram a Y")
        if self.fit_intercept != (moments.x_mean is not None):
            raise ValueError(f"fit_intercept={self.fit_intercept} needs moments of gram(…, center={self.fit_intercept})")
        alpha = as_number(self.alpha, "alpha")
        if not 0.0 <= alpha < np.inf:
            raise ValueError(f"alpha must be finite and not negative, got {self.alpha!r}")
        options = dict(self.solve_options or {})
        if twice := sorted(options.keys() & _SET_HERE):
            instead = f"give {twice[0]}=… itself" if twice[0] in _names(type(self)) else "leave it out"
            raise ValueError(f"solve_options: {twice[0]!r} is what {type(self).__name__} hands to the solver by itself; {instead}")
        n, k = (int(size) for size in moments.rhs.shape)
        place = place_of(moments.H)
        mean = mean_diagonal(to_core(moments.H, place, "H"))
        zeros_NK = 0.0 * moments.rhs
        limits = {name: self._transposed(getattr(self, name), (n, k), name) for name in ("lower", "upper")}
        solution = prepare(moments.H, damping=alpha / mean if mean > 0.0 else 0.0).solve(
            zeros_NK, np.ones((n, k), dtype=bool) if self.mask is None else self._transposed(self.mask, (n, k), "mask"),
            self.backend, rhs=moments.rhs, constant=moments.constant, tol=self.tol, dtype="float64", **limits,
            **options,
        )  # fmt: skip
        if (invalid := [j for j, status in enumerate(solution.status) if status is Status.INVALID_INPUT]):  # the moments are finite
            raise ValueError(f"lower or upper holds NaN, first for output {invalid[0]}")
        if not solution.optimal.all():
            many = f"{int((~solution.optimal).sum())} of {counted(k, 'output')}"
            warnings.warn(f"{many} not certified to {self.tol:g}: see solution_; alpha > 0 or more rows may help", stacklevel=3)
        coef_KN = solution.weights.T
        intercept_K: Any = 0.0
        if self.fit_intercept:
            intercept_K = moments.y_mean - coef_KN @ moments.x_mean
        self.solution_, self.n_features_in_ = solution, n
        self.coef_ = coef_KN[0] if single else coef_KN
        self.intercept_ = float(intercept_K[0]) if single and self.fit_intercept else intercept_K
        return self

    def predict(self, X: Any) -> Array:
        """X C' + c, (T, outputs), or (T,) after a y of one dimension."""
        if not hasattr(self, "coef_"):
            raise _not_fitted(f"this {type(self).__name__} is not fitted yet: call fit first")
        X, _ = self._checked(X, None, reset=False)
        place = place_of(self.coef_)
        coef, intercept = (to_core(x, place, name) for x, name in ((self.coef_, "coef_"), (self.intercept_, "intercept_")))
        return from_core(cast(to_core(X, place, "X"), dtype_name(coef)) @ coef.T + intercept, place)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R² = 1 − Σ s (y − ŷ)² / Σ s (y − ȳ)², the mean over outputs; of a constant output 1 if it is met, else 0."""
        found_TK, y_TK = (np.asarray(to_numpy(x), dtype=np.float64) for x in (self.predict(X), y))
        found_TK, y_TK = found_TK.reshape(len(found_TK), -1), y_TK.reshape(len(y_TK), -1)
        weights_T = np.ones(len(y_TK)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        left_K = weights_T @ (y_TK - found_TK) ** 2
        total_K = weights_T @ (y_TK - np.average(y_TK, axis=0, weights=weights_T)) ** 2
        share_K = np.divide(left_K, total_K, out=(left_K > 0).astype(np.float64), where=total_K > 0)
        return float((1.0 - share_K).mean())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {name: getattr(self, name) for name in _names(type(self))}

    def set_params(self, **params: Any) -> MaskedRidge:
        """Set arguments of the constructor by name; ValueError for one that there is not."""
        for name, value in params.items():
            if name not in (known := _names(type(self))):
                raise ValueError(f"invalid parameter {name!r} for {type(self).__name__}; valid ones: {', '.join(known)}")
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, RegressorTags, Tags, TargetTags

        return Tags(
            estimator_type="regressor",
            target_tags=TargetTags(required=True, one_d_labels=False, two_d_labels=False, multi_output=True, single_output=True),
            regressor_tags=RegressorTags(),
            input_tags=InputTags(),
        )

    def __repr__(self) -> str:
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        changed = {name: value for name, value in self.get_params().items() if value is not defaults[name]}
        shown = ", ".join(f"{name}={'…' if hasattr(value, 'shape') else repr(value)}" for name, value in changed.items())
        return f"{type(self).__name__}({shown})"

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        """X and y as arrays, with scikit-learn's own checks where it is in use: then its words and its handling of tables apply."""
        if reset and y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        if "sklearn" in sys.modules and kind_of(X) == "numpy":
            from sklearn.utils.validation import validate_data

            more = {} if y is None else {"y": y, "multi_output": True, "y_numeric": True}
            checked = validate_data(self, X, reset=reset, dtype=(np.float64, np.float32), **more)
            return (checked, None) if y is None else checked
        arrays = [x if x is None or hasattr(x, "shape") and kind_of(x) != "numpy" else _array(x) for x in (X, y)]
        if arrays[0].ndim != 2:
            raise ValueError(f"X must be (T, inputs), got shape {tuple(arrays[0].shape)}")
        if not reset and arrays[0].shape[1] != self.n_features_in_:
            raise ValueError(f"X has {counted(arrays[0].shape[1], 'input')}, the model was fitted to {self.n_features_in_}")
        self._remember(X) if reset else self._check_order(X)
        return arrays[0], arrays[1]

    def _remember(self, X: Any) -> None:
        """The names of a table's columns; of an earlier fit none stay."""
        vars(self).pop("feature_names_in_", None)
        if (names := _columns(X)) is not None:
            self.feature_names_in_ = names

    def _check_order(self, X: Any) -> None:
        """ValueError for a table whose columns are others than those of the fit, or in another order. What has no names passes."""
        names, known = _columns(X), getattr(self, "feature_names_in_", None)
        if names is None or known is None or list(names) == list(known):
            return
        place = next(place for place, pair in enumerate(zip(names, known, strict=True)) if pair[0] != pair[1])
        raise ValueError(
            f"the feature names should match those that were passed during fit: column {place} of X is {names[place]!r}, "
            f"there it was {known[place]!r}"
        )

    @staticmethod
    def _transposed(value: Any, shape: tuple[int, int], name: str) -> Any:
        """A mask or bound of ``coef_``'s shape as the (N, K) that a solve takes."""
        if value is None or np.ndim(value) == 0:
            return value
        value = value if hasattr(value, "shape") else np.asarray(value)
        value = value[None, :] if value.ndim == 1 and shape[1] == 1 else value
        if tuple(value.shape) != shape[::-1]:
            turned = f"; qprecon.solve has (inputs, outputs): give {name}.T" if tuple(value.shape) == shape else ""
            raise ValueError(f"{name} has shape {tuple(value.shape)}, coef_ is (outputs, inputs), here {shape[::-1]}{turned}")
        return value.T


def fit(
    X: Array | Iterable[Any],
    Y: Array | None = None,
    mask: Any = None,
    *,
    alpha: float = 1.0,
    sample_weight: Array | None = None,
    fit_intercept: bool = True,
    **settings: Any,
) -> MaskedRidge:
    """Masked ridge regression of all outputs at once: ``MaskedRidge`` fitted to data of any kind.

    Args:
        X, Y: as in ``qprecon.gram``: arrays of numpy, torch or jax, memmaps, or (X alone) an iterable of batches (x, y). They need
            not fit into memory.
        mask: (outputs, inputs), the shape of ``coef_``: the transpose of a mask for ``qprecon.solve``, so give ``mask.T`` of such a
            one. With as many outputs as inputs no shape tells the one from the other: there is no error then.
        sample_weight: (T,), for one array X.
        alpha, fit_intercept, settings: those of ``MaskedRidge``.

    Returns:
        MaskedRidge, fitted: ``coef_``, ``intercept_`` and ``solution_`` are of X's kind and on its device, in float64.

    Raises:
        ValueError: see ``qprecon.gram`` and ``qprecon.solve``.
    """
    if unknown := settings.keys() - inspect.signature(MaskedRidge).parameters.keys():
        where = "; arguments of qprecon.solve go into solve_options"
        raise TypeError(f"fit() got an unexpected keyword argument {min(unknown)!r}{where}")
    model = MaskedRidge(mask, alpha=alpha, fit_intercept=fit_intercept, **settings)
    model.fit_moments(gram(X, Y, weights=sample_weight, center=fit_intercept), single=Y is not None and Y.ndim == 1)
    model._remember(X)
    return model


def _columns(X: Any) -> np.ndarray | None:
    """The names of a table's columns, if all are strings."""
    names = list(getattr(X, "columns", ()))
    return np.array(names, dtype=object) if names and all(isinstance(name, str) for name in names) else None


def _array(x: Any) -> np.ndarray:
    if is_sparse(x):
        raise ValueError("X is sparse, and the arithmetic here is dense: give X.toarray()")
    return np.asarray(x)


def _names(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def _not_fitted(text: str) -> Exception:
    if "sklearn" in sys.modules:
        from sklearn.exceptions import NotFittedError

        return NotFittedError(text)
    return AttributeError(text)
