"""Random layers for the tests of mask selectors."""

import numpy as np
import torch

from qprecon.llm.masks import LayerData


def random_layer(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=generator) / n**0.5
    x = torch.randn(4 * n, n, generator=generator) @ mix
    return LayerData("layer", torch.randn(n, k, generator=generator), x.T @ x, 4 * n)


def damped(data):
    h = data.hessian_NN.double().numpy()
    return h + 0.01 * np.diag(h).mean() * np.eye(len(h))
