"""The options of backends whose own modules import a solver, which takes long: here a wrong one is told before that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MpaxOptions:
    """Own options.

    Attributes:
        paper: the paper's setting: relative and absolute tolerance 0.01 whatever ``tol`` is, no normalisation by the core,
            jax's own matmul precision, one round, and its rule that a layer is skipped (comes back as it started) when most of
            its columns do not converge or its total error grows. The rule sees a chunk: ``batch_size=K`` makes that the layer.
        batch: columns a call of MPAX; None means the whole chunk, or 96 with ``paper``.
        jit: False calls MPAX traced anew each time, as the paper's code does; only of use as a baseline.
    """

    paper: bool = False
    batch: int | None = None
    jit: bool = True

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ValueError(f"batch must be a positive integer, got {self.batch!r}")

    @property
    def scaling(self) -> str | None:
        """Overrides ``Capabilities.scaling``."""
        return "none" if self.paper else None

    @property
    def warm_start(self) -> bool | None:
        """Overrides ``Capabilities.warm_start``: the paper's setting starts once, from Δ = 0."""
        return False if self.paper else None


@dataclass(frozen=True)
class OsqpOptions:
    """Own options.

    Attributes:
        polishing: solve the KKT system of the guessed active set at the end; nearly exact where the guess is right.
        workers: threads, each with a factor of its own (about 16 N² bytes); None means one for every 8 columns, at most as many as
            there are usable cores.
    """

    polishing: bool = True
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be a positive integer, got {self.workers!r}")


@dataclass(frozen=True)
class MoreauOptions:
    """Own options.

    Attributes:
        method: "ipm" or "active_set". Columns without any bound take "ipm" in any case: Moreau 0.4.1 would crash the process.
    """

    method: str = "ipm"

    def __post_init__(self) -> None:
        if self.method not in ("ipm", "active_set"):
            raise ValueError(f"method must be 'ipm' or 'active_set', got {self.method!r}")


@dataclass(frozen=True)
class CvxpyOptions:
    """Own options.

    Attributes:
        form: "box" (constrained, paper eq. constrained_objective) or "reduced" (unconstrained, paper eq. unconstrained_qp_params).
        solver: a name from ``cvxpy.installed_solvers()``; None means the first good one.
    """

    form: str = "box"
    solver: str | None = None

    def __post_init__(self) -> None:
        if self.form not in ("box", "reduced"):
            raise ValueError(f"form must be 'box' or 'reduced', got {self.form!r}")


@dataclass(frozen=True)
class NoOptions:
    """It has none of its own."""
