"""The model card: README.md of an output folder."""

from __future__ import annotations

from typing import Any

from qprecon.llm.reporting.report import REPORT_NAME, PruneReport
from qprecon.wording import counted


def card_front(base: Any, made: str = "pruned") -> str:
    """The beginning of a model card. base: the dense model, named if it is a hub name with an owner; made: what was done to it."""
    front = f"base_model: {base}\n" if isinstance(base, str) and base.count("/") == 1 and base[0] not in "/.~" else ""
    return f"---\nlibrary_name: transformers\n{front}tags:\n- {made}\n- qprecon\n---\n\n"


def model_card(report: PruneReport) -> str:
    """A short README.md for the output folder."""
    settings = report.settings
    update = {"none": "left as they were", "own": f"as {settings['mask']} itself updates them"}.get(
        settings["update"], "rebuilt by solving each column's quadratic program (OPTIMA), certified"
    )
    gap = "" if report.largest_gap is None else f"- Largest certified relative gap of any column: {report.largest_gap:.2e}\n"
    rule = {"owl": "by OWL", "loss": "by the loss's gradients"}.get(settings.get("allocation", ""))
    shared = f" on average, shared out between blocks {rule}" if rule else ""
    base = settings.get("model")
    kept = "not stored in few bits" if report.quantised_only else "left dense"
    dense = "".join(f"{share:.1%} of the model {kept}: {what}.\n" for what, share in report.much_left_dense)
    how = f"- Pattern: {settings['pattern']}{shared}; masks: {settings['mask']}; kept weights: {update}\n"
    alone, made, costs = f"{report.mean_error('error_masked'):.4g} with the mask alone, ", "Pruned", "Pruning costs"
    if report.quantised_only:
        how = f"- Weights: {settings['quantize']}, rounded by {settings.get('rounding', 'sweep')}\n"
        alone, made, costs = "", "Quantised", "Few bits cost"
    return (
        f"{card_front(base, made.lower())}"
        f"# {made} {base or 'model'}\n\n"
        f"{made} with qprecon {report.versions['qprecon']}: {counted(len(report.layers), 'linear layer')}, "
        f"{report.sparsity:.2%} of their weights are zero ({report.model_sparsity:.2%} of the whole model{report.were_zero}).\n"
        f"{dense}\n"
        f"{how}"
        f"- Preset: {settings.get('preset', 'fast')}; the report has every setting\n"
        f"- Calibration: {counted(settings['nsamples'], 'window')} of {counted(settings['seqlen'], 'token')}, "
        f"seed {settings['seed']}"
        f"{', from ' + settings['calibration'] if settings.get('calibration') else ''}\n"
        f"{gap}"
        f"- Mean relative reconstruction error of a layer{f' ({report.measure})' if report.measure else ''}: "
        f"{alone}{report.mean_error('error_stored'):.4g} as stored\n\n"
        f"{report.stored_as()} {costs} quality; measure it on your own task before use.\n\n"
        f"{_reading(settings.get('adapter_rank', 0), packed=any(row.bits is not None for row in report.layers))}"
        f"Each layer's figures are in `{REPORT_NAME}`.\n"
    )


def _reading(rank: int, packed: bool) -> str:
    """How to load packed weights, and what lies beside the weights: PEFT wants a layer's `weight`."""
    if not rank:
        return (
            "Loaded with `quantization_config=CompressedTensorsConfig(run_compressed=False)` (from transformers) the weights are "
            "unpacked as they are read, which a few classes of models need; else on the first forward pass.\n\n"
        ) * packed
    config = ", CompressedTensorsConfig" if packed else ""
    unpacked = ", quantization_config=CompressedTensorsConfig(run_compressed=False)" if packed else ""
    return (
        f"The folder `adapter` holds a low-rank part of rank {rank} that belongs to these weights; the errors above are those of "
        "both together. Weights that are loaded without it are worse. With PEFT:\n\n"
        f"```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM{config}\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto"{unpacked})\n'
        'model = PeftModel.from_pretrained(model, "FOLDER/adapter")\n```\n\n'
    )
