"""Words of other tools' command lines that are no words here, and what does the same here: for messages about an unknown word.

Of Wanda's and SparseGPT's scripts, GPTQ's and AutoGPTQ's, llm-compressor and lm-eval. Words that mean here what they mean there are
taken as they are in recipes (`Option.aliases`); these differ, in their values too, or are flags only.
"""

from __future__ import annotations

from collections.abc import Mapping

_MODEL, _OUT, _TEXT, _QUANTIZE = ("model",), ("out",), ("calibration", "text"), ("quantize",)
_SAVED = "the reports are written beside the model"
_ZERO_SHOT = "tasks are measured apart, and without examples: `qprecon eval OUT --tasks piqa,arc_easy`"

# word -> (options here, of which a command has one; what else there is to know)
OTHER_WORDS: dict[str, tuple[tuple[str, ...], str]] = {
    "prune_method": (("mask",), ""),
    "pruning_method": (("mask",), ""),
    "method": (("mask",), ""),
    "gmp": (("mask",), "magnitude"),
    "sparsity_ratio": (("sparsity",), ""),
    "sparsity_level": (("sparsity",), ""),
    "sparsity_type": (("pattern",), "which counts the weights KEPT, so that 1:4 there is 3:4 here"),
    "mask_structure": (("pattern",), "N:M with N kept"),
    "prunen": (("pattern",), "N:M with N kept"),
    "prunem": (("pattern",), "N:M with N kept"),
    "blocksize": (("mask_options",), "block_size=128"),
    "block_size": (("mask_options",), "block_size=128"),
    "use_variant": ((), "Wanda's variant with a threshold of its own a row is not there"),
    "percdamp": (("damping",), ""),
    "dampening_frac": (("damping",), ""),
    "damp_percent": (("damping",), ""),
    "true_sequential": (("order",), ""),
    "minlayer": (("targets",), "names of layers"),
    "maxlayer": (("targets",), "names of layers"),
    "prune_only": (("targets",), ""),
    "invert": (("ignore",), ""),
    "exclude": (("ignore",), ""),
    "wbits": (_QUANTIZE, "int4 for 4 bits"),
    "bits": (_QUANTIZE, "int4 for 4 bits"),
    "num_bits": (_QUANTIZE, "int4 for 4 bits"),
    "scheme": (_QUANTIZE, "int4 for W4A16"),
    "groupsize": (("group_size",), ""),
    "act_order": (("rounding",), "gptq-order"),
    "desc_act": (("rounding",), "gptq-order"),
    "nearest": (("rounding",), "nearest"),
    "num_calibration_samples": (("nsamples", "max_windows"), ""),
    "num_samples": (("nsamples", "max_windows"), ""),
    "nsamples": (("nsamples", "max_windows"), ""),
    "max_seq_length": (("seqlen",), ""),
    "max_seq_len": (("seqlen",), ""),
    "max_length": (("seqlen",), ""),
    "seq_len": (("seqlen",), ""),
    "model_seqlen": (("seqlen",), ""),
    "dataset": (_TEXT, "a file of text or a name on the hub"),
    "dataset_path": (_TEXT, "a file of text or a name on the hub"),
    "calib_dataset": (_TEXT, "a file of text or a name on the hub"),
    "calibration_dataset": (_TEXT, "a file of text or a name on the hub"),
    "model": (_MODEL, ""),
    "model_name_or_path": (_MODEL, ""),
    "model_path": (_MODEL, ""),
    "model_args": (_MODEL, ""),
    "pretrained": (_MODEL, ""),
    "save_model": (_OUT, ""),
    "output_dir": (_OUT, ""),
    "output_path": (("out", "save"), ""),
    "output": (_OUT, ""),
    "out": (_OUT, ""),
    "save_safetensors": (_OUT, ""),
    "save": (_OUT, _SAVED),
    "log_wandb": ((), _SAVED),
    "eval_zero_shot": ((), _ZERO_SHOT),
    "num_fewshot": ((), _ZERO_SHOT),
    "eval": ((), _ZERO_SHOT),
    "cache_dir": ((), "the hub's copies lie where the environment's HF_HOME says"),
    "trust_remote_code": ((), "a model's own code is not run here: load it yourself and hand it to `qprecon.llm.prune_model`"),
    "gpu": (("device",), ""),
    "cuda": (("device",), ""),
    "learning_rate": (("lr",), ""),
    "num_train_epochs": (("passes",), ""),
    "epochs": (("passes",), ""),
    "per_device_train_batch_size": (("batch",), ""),
    "teacher": (("dense",), ""),
    "load": (_MODEL, ""),
}  # fmt: skip


def elsewhere(word: str, here: Mapping[str, str]) -> str:
    """The end of a message about a word of another tool; "" for any other word.

    here: the options that there are, each as it is to be written.
    """
    names, more = OTHER_WORDS.get(word.lower().replace("-", "_").strip("_"), ((), ""))
    options = [here[name] for name in names if name in here]
    if options:
        return f"; here that is {options[0]}" + (f": {more}" if more else "")
    return f"; {more}" if more and not names else ""
