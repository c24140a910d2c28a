"""From text to H: windows of tokens, recorded calls of the blocks, Gram matrices."""

from qprecon.llm import check_installed

check_installed()
