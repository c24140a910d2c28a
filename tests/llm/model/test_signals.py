"""What a handler of signals raises comes out of places where any error of a library means something else: not it, or not here."""

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from torch import nn

from qprecon.llm.evaluation import tasks
from qprecon.llm.files import folders, hub
from qprecon.llm.model import norms
from qprecon.llm.model.fused import gated, rotations
from qprecon.llm.model.loading import load_tokenizer
from qprecon.llm.model.unprunable import ReplayCheck
from qprecon.llm.statistics import gradients
from tests.llm.toy_text import toy_tokenizer

pytestmark = [pytest.mark.own, pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX signals")]
ON = torch.float32, torch.device("cpu")


class TooLate(OSError, RuntimeError):
    """Of a caller, and of the classes that are looked for."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TooLate("mine")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.signal(signal.SIGALRM, before)


def alarm(*given: object, **named: object) -> None:
    signal.raise_signal(signal.SIGALRM)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> None:
        alarm()


def in_context(context: object) -> None:
    with context:
        alarm()


PLACES = {
    "local_copy": lambda: folders.local_copy("someone/something"),
    "fetched_model": lambda: hub.fetched_model("someone/something"),
    "norms": lambda: norms.recognised(Norm()),
    "rotations": lambda: rotations.recognised(alarm, *ON, 8),
    "gated": lambda: gated.recognised(alarm, nn.Identity(), *ON),
    "replays": lambda: ReplayCheck._replayed(SimpleNamespace(_refusal=str), 0, alarm, torch.ones(1)),
    "gradients": lambda: in_context(gradients._explained("block 0")),
    "tasks": lambda: tasks._from_hub(alarm),
}


@pytest.mark.parametrize("place", PLACES)
def test_where_an_error_means_something_else(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*given: object, **named: object) -> None:
        try:
            alarm()
        except TooLate as error:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no connection") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(rotations, "_rotated", alarm)
    monkeypatch.setattr(gated, "_activation", lambda module: module)
    monkeypatch.setattr(gated, "_is_silu", alarm)
    with pytest.raises(TooLate, match="^mine$") as caught:
        PLACES[place]()
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_a_tokenizer_that_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes "Unable to load vocabulary" of any OSError."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    toy_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "__init__", alarm)
    with pytest.raises(TooLate, match="^mine$"):
        load_tokenizer(tmp_path)
