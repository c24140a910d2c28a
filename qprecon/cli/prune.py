"""`qprecon prune MODEL OUT`."""

from __future__ import annotations

import argparse

_EPILOG = """\
Zeros neither shrink nor speed up a dense checkpoint: OUT holds plain dense safetensors that any software can load.
To use them, a runtime with sparse kernels (for 2:4) or sparse storage is needed.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "prune",
        help="prune a causal language model and rebuild its weights",
        description="Prune the linear layers of a model's decoder blocks, rebuild the kept weights optimally, and save it.",
        epilog=_EPILOG,
    )
    parser.add_argument("model", metavar="MODEL", help="a model folder in the Hugging Face layout, or a hub name")
    parser.add_argument("out", metavar="OUT", help="where the pruned model and its report go")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--sparsity", type=float, default=0.5, help="share of zeros in each output's weights (default 0.5)")
    amount.add_argument(
        "--pattern",
        metavar="N:M",
        help="N of every M consecutive inputs are KEPT, e.g. 2:4. Careful: the scripts of Wanda and SparseGPT count the "
        "PRUNED ones, so their 1:4 is 3:4 here",
    )
    parser.add_argument("--mask", default="wanda", help="which weights to keep: wanda (default), magnitude, ...")
    parser.add_argument(
        "--update",
        default="optimal",
        help="the kept weights: optimal (default); none leaves them; own takes the mask method's; adam uses Adam",
    )
    parser.add_argument("--backend", default="auto", help="solver; see `qprecon backends` (default auto)")
    parser.add_argument(
        "--calib",
        metavar="FILE|builtin|c4",
        default="c4",
        help='calibration text: a text file, a .jsonl(.gz) file with a "text" field, "builtin" (Python\'s own '
        "documentation), or a name for the `datasets` library (default c4)",
    )
    parser.add_argument("--nsamples", type=int, default=128, help="calibration windows (default 128)")
    parser.add_argument("--seqlen", type=int, default=2048, help="tokens a window (default 2048, whatever the model's maximum)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of windows (default 0)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    parser.add_argument("--damping", type=float, default=0.01, help="share of the mean diagonal added to H (default 0.01)")
    parser.add_argument("--tol", type=float, default=1e-4, help="certified relative gap asked for (default 1e-4)")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="only these layers: names, globs, or re:PATTERN (default all)")
    parser.add_argument("--ignore", nargs="+", metavar="NAME", help="leave these layers alone; written like --targets")
    parser.add_argument(
        "--propagate",
        default="pruned",
        choices=["pruned", "dense"],
        help="calibrate each block on the inputs that the pruned (default) or the dense blocks before it give",
    )
    parser.add_argument(
        "--resume",
        default=True,
        action=argparse.BooleanOptionalAction,
        help="continue a run that was interrupted (default), or start over",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prune, save, and print what was done."""
    from qprecon.llm import prune_model
    from qprecon.llm.texts import load_texts

    report = prune_model(
        arguments.model,
        load_texts(arguments.calib),
        sparsity=arguments.sparsity,
        pattern=arguments.pattern,
        mask=arguments.mask,
        update=arguments.update,
        backend=arguments.backend,
        damping=arguments.damping,
        tol=arguments.tol,
        nsamples=arguments.nsamples,
        seqlen=arguments.seqlen,
        seed=arguments.seed,
        targets=arguments.targets,
        ignore=arguments.ignore,
        propagate=arguments.propagate,
        out=arguments.out,
        device=arguments.device,
        progress=not arguments.quiet,
        resume=arguments.resume,
    )
    if not arguments.quiet:
        print(report.summary())
        print(f"the pruned model and its report are in {arguments.out}")
    return 0
