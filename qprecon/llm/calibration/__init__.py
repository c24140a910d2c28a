"""From text to H: windows of tokens, recorded calls of the blocks, Gram matrices."""
