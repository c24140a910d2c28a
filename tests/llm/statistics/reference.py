"""The slow, obvious way: every activation of a whole model at once, float64."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch

from qprecon.llm.model.blocks import find_blocks
from qprecon.llm.model.linears import find_linears

GROUPS = {
    "llama": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
    "gemma3": [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
    "phi3": [["qkv_proj"], ["o_proj"], ["gate_up_proj"], ["down_proj"]],
    "opt": [["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"]],
    "gpt2": [["c_attn"], ["attn.c_proj"], ["c_fc"], ["mlp.c_proj"]],
}


# Whose input the residual stream is where these layers add to it.
STREAMS = {
    "llama": {"o_proj": "input_layernorm", "down_proj": "post_attention_layernorm"},
    "gpt2": {"attn.c_proj": "ln_1", "mlp.c_proj": "ln_2"},
}


def doubled(model):
    return copy.deepcopy(model).double()


def views_of(model):
    """Views of each block, by the end of their names in `GROUPS`."""
    return [{view.name: view for view in find_linears(block, model=model).views} for block in find_blocks(model)]


@contextmanager
def inputs_seen(views):
    """While open, what each view's module is given, one tensor a call."""
    seen = {name: [] for name in views}
    handles = [
        view.module.register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].detach()))
        for name, view in views.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def stream_of(model, index, name, family, samples):
    """The residual stream that the layer `name` of a block adds to, (all tokens, K)."""
    end = next(end for end in STREAMS[family] if name.endswith(end))
    block, seen = find_blocks(model)[index].module, []
    norm = block.get_submodule(STREAMS[family][end])
    handle = norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for sample in samples:
            model(sample.reshape(1, -1), use_cache=False)
    handle.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])


def inputs_of(model, views, samples):
    """name -> (all tokens, N), float64."""
    with inputs_seen(views) as seen, torch.no_grad():
        for sample in samples:
            model(sample.reshape(1, -1), use_cache=False)
    return {name: torch.cat([x.reshape(-1, x.shape[-1]) for x in parts]) for name, parts in seen.items()}


def squared_gradients(model, samples, over=-1):
    """name -> (all tokens,), the mean over outputs of the squared gradient of the summed loss, of every linear of the blocks.

    over=0: the mean over tokens in its place, (K,).

    In float64 but for models with experts, which have products without it.
    """
    experts = any("expert" in name for name, _ in model.named_modules())
    model = copy.deepcopy(model) if experts else doubled(model)
    views = {name: view for block in views_of(model) for name, view in block.items() if not view.may_be_idle}
    found = {name: [] for name in views}

    def hook(name):
        def after(module, args, output):
            output.register_hook(lambda gradient: found[name].append(gradient.square().reshape(-1, gradient.shape[-1])))

        return after

    for name, view in views.items():
        view.module.register_forward_hook(hook(name))
    for sample in samples:
        logits = model(sample.reshape(1, -1), use_cache=False).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], sample[1:], reduction="sum").backward()
    return {name: torch.cat(parts).mean(over) for name, parts in found.items()}


def token_weights(squares, views, power):
    """s_t of a group of layers: their mean by outputs, to the power, of mean 1."""
    total = sum(view.n_outputs for view in views)
    raw = sum(squares[view.name] * view.n_outputs / total for view in views).pow(power)
    return raw / raw.mean()


def grams(x_TN, dense_TN, s_T):
    """H, D and E, the Gram matrices of x, of x with the differences, and of the differences."""
    delta_TN = dense_TN - x_TN
    left_NT = (s_T.unsqueeze(1) * x_TN).T
    return left_NT @ x_TN, left_NT @ delta_TN, (s_T.unsqueeze(1) * delta_TN).T @ delta_TN


def pruned(model, samples, family, sparsity=0.5, damping=0.01, order=False, drift=0.0, power=0.0, residual=0.0):
    """A float64 copy of the model, pruned with Wanda's masks and optimal weights, layer by layer with dense solves."""
    dense, result = doubled(model), doubled(model)
    squares = squared_gradients(model, samples) if power else {}
    for index, (views, dense_views) in enumerate(zip(views_of(result), views_of(dense), strict=True)):
        groups = [[view for name in names for key, view in views.items() if key.endswith(name)] for names in GROUPS[family]]
        x_dense, x_first = inputs_of(dense, dense_views, samples), inputs_of(result, views, samples)
        for group in groups:
            x = inputs_of(result, views, samples) if order else x_first
            for view in group:
                tokens = len(x[view.name])
                s_T = token_weights(squares, group, power) if power else torch.ones(tokens, dtype=torch.float64)
                hessian_NN, drift_NN, _ = grams(x[view.name], x_dense[view.name], s_T)
                ridge_NN = damping * hessian_NN.diagonal().mean() * torch.eye(len(hessian_NN), dtype=torch.float64)
                w_NK = view.weights_NK(torch.float64)
                more_NK = drift * drift_NN @ w_NK
                if residual and view.name.endswith(tuple(STREAMS[family])):
                    there, here = (stream_of(each, index, view.name, family, samples) for each in (dense, result))
                    more_NK = more_NK + residual * (s_T.unsqueeze(1) * x[view.name]).T @ (there - here)
                asked_NK = w_NK + torch.linalg.solve(hessian_NN + ridge_NN, more_NK)
                score_NK = asked_NK.abs() * hessian_NN.diagonal().sqrt().unsqueeze(1)
                gone = int(sparsity * len(w_NK))
                new_NK = torch.zeros_like(w_NK)
                rhs_NK = (hessian_NN + ridge_NN) @ w_NK + more_NK
                for k in range(w_NK.shape[1]):
                    kept = score_NK[:, k].argsort()[gone:]
                    system = (hessian_NN + ridge_NN)[kept][:, kept]
                    new_NK[kept, k] = torch.linalg.solve(system, rhs_NK[kept, k])
                view.write(new_NK)
    return result
