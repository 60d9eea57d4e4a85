"""A small convolutional network in NumPy float64 with its backward pass written by hand, and its twin in torch.

Shapes: N images, C channels in, O channels out, H x W pixels in, h x w pixels out. The network is

    0 conv 3x3, 3 -> 6    1 batch norm    2 ReLU
    3 conv 3x3 / 2, 6 -> 8    4 batch norm    5 ReLU    6 global average    7 flatten    8 linear 8 -> 5

and the names of its parameters are those of the `torch.nn.Sequential` of these nine layers. Batch norm always uses the
statistics of the batch (biased variance).

A *network*, for `oracle.algorithm`, is anything with `forward(params, x) -> (logits, cache)` and
`backward(params, cache, grad_logits) -> gradients`; this module is one.
"""

import numpy as np

EPS = 1e-5
SHAPES = {
    "0.weight": (6, 3, 3, 3),
    "1.weight": (6,),
    "1.bias": (6,),
    "3.weight": (8, 6, 3, 3),
    "4.weight": (8,),
    "4.bias": (8,),
    "8.weight": (5, 8),
    "8.bias": (5,),
}
BATCH_NORM_AFFINE = ("1.weight", "1.bias", "4.weight", "4.bias")
STRIDES = {"0.weight": 1, "3.weight": 2}


def initial_parameters(seed=0):
    """Random parameters whose predictions are neither flat nor saturated, so that a confidence gate has work to do."""
    rng = np.random.default_rng(seed)
    centre = {"1.weight": 1.0, "4.weight": 1.0}
    scale = {"0.weight": 0.3, "3.weight": 0.2, "8.weight": 3.0}
    return {
        name: centre.get(name, 0.0) + scale.get(name, 0.2) * rng.standard_normal(shape)
        for name, shape in SHAPES.items()
    }


def images(n=12, seed=0):
    """Images [n, 3, 8, 8] in [0, 1] that differ from one another: each has its own colour, contrast and gradient."""
    rng = np.random.default_rng(seed)
    colour = rng.uniform(0.2, 0.8, (n, 3, 1, 1))
    slope = rng.uniform(-0.4, 0.4, (n, 3, 1, 1)) * np.linspace(-1, 1, 8)
    noise = rng.uniform(0.05, 0.3, (n, 1, 1, 1)) * rng.standard_normal((n, 3, 8, 8))
    return np.clip(colour + slope + noise, 0, 1)


def forward(params, x):
    """Logits [N, 5] and what `backward` needs."""
    cache = {}
    for conv, norm in (("0", "1"), ("3", "4")):
        weight = params[f"{conv}.weight"]
        cache[conv] = x
        x = _conv(x, weight, STRIDES[f"{conv}.weight"])
        x, cache[norm] = _batch_norm(x, params[f"{norm}.weight"], params[f"{norm}.bias"])
        cache[f"{norm}.active"] = x > 0
        x = np.where(x > 0, x, 0.0)
    cache["pixels"] = x.shape[2:]
    cache["8"] = x.mean(axis=(2, 3))
    return cache["8"] @ params["8.weight"].T + params["8.bias"], cache


def backward(params, cache, grad_logits):
    """Gradients of a scalar with respect to every parameter, given its gradient [N, 5] with respect to the logits."""
    grads = {"8.weight": grad_logits.T @ cache["8"], "8.bias": grad_logits.sum(axis=0)}
    h, w = cache["pixels"]
    grad = np.repeat(np.repeat((grad_logits @ params["8.weight"] / (h * w))[:, :, None, None], h, axis=2), w, axis=3)
    for conv, norm in (("3", "4"), ("0", "1")):
        grad = grad * cache[f"{norm}.active"]
        grad, grads[f"{norm}.weight"], grads[f"{norm}.bias"] = _batch_norm_backward(
            grad, params[f"{norm}.weight"], *cache[norm]
        )
        weight = params[f"{conv}.weight"]
        grad, grads[f"{conv}.weight"] = _conv_backward(grad, cache[conv], weight, STRIDES[f"{conv}.weight"])
    return {name: grads[name] for name in SHAPES}


def _taps(x, stride):
    """For each of the nine kernel positions (i, j): the slices of the padded image that it multiplies."""
    h, w = ((size - 1) // stride + 1 for size in x.shape[2:])  # 3x3 kernel, padding 1
    for i in range(3):
        for j in range(3):
            yield i, j, (..., slice(i, i + stride * (h - 1) + 1, stride), slice(j, j + stride * (w - 1) + 1, stride))


def _pad(x):
    return np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))


def _conv(x, weight, stride):
    padded = _pad(x)
    return sum(np.einsum("oc,nchw->nohw", weight[:, :, i, j], padded[tap]) for i, j, tap in _taps(x, stride))


def _conv_backward(grad, x, weight, stride):
    padded = _pad(x)
    grad_padded, grad_weight = np.zeros_like(padded), np.zeros_like(weight)
    for i, j, tap in _taps(x, stride):
        grad_weight[:, :, i, j] = np.einsum("nohw,nchw->oc", grad, padded[tap])
        grad_padded[tap] += np.einsum("oc,nohw->nchw", weight[:, :, i, j], grad)
    return grad_padded[:, :, 1:-1, 1:-1], grad_weight


def _batch_norm(x, weight, bias):
    mean = x.mean(axis=(0, 2, 3), keepdims=True)
    inverse_std = 1 / np.sqrt(x.var(axis=(0, 2, 3), keepdims=True) + EPS)
    normal = (x - mean) * inverse_std
    return weight[:, None, None] * normal + bias[:, None, None], (normal, inverse_std)


def _batch_norm_backward(grad, weight, normal, inverse_std):
    over = (0, 2, 3)
    grad_weight, grad_bias = (grad * normal).sum(axis=over), grad.sum(axis=over)
    grad = grad * weight[:, None, None]  # with respect to the normalised values, from here on
    projected = normal * (grad * normal).mean(axis=over, keepdims=True)
    return inverse_std * (grad - grad.mean(axis=over, keepdims=True) - projected), grad_weight, grad_bias


def torch_network(params=None):
    """The same network as a float64 `torch.nn.Module` in training mode; params: as `initial_parameters()`."""
    import torch
    from torch import nn

    module = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6, eps=EPS),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8, eps=EPS),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).double()
    params = initial_parameters() if params is None else params
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(params[name]))
    return module


def parameters_of(module):
    """The parameters of a torch module by name, as NumPy copies."""
    return {name: parameter.detach().cpu().numpy().copy() for name, parameter in module.named_parameters()}
