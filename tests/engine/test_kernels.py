"""The Triton kernels against their plain-torch twins, on the CPU by Triton's interpreter and on a GPU as they are.

The interpreter is chosen when Triton is imported, so these tests run in a process of their own.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

CHECKS = """
import itertools, math, torch
from dataclasses import replace
from petal.augment import Views
from petal.engine import kernels, normalise, passes, views
from petal.engine.passes import Rule
from petal.functional import quantile_
from petal.methods.network import ViewSource

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

def twin(function, *args):
    kept, passes._kernels = passes._kernels, None
    try:
        return function(*args)
    finally:
        passes._kernels = kept

# the threshold is the exact one: ties, zeros, both ends, one value, denormals
for count, q in itertools.product((1, 5, 1000, 8001), (0.0, 0.03, 1.0)):
    g = torch.randn(count, device=device) * torch.randn(count, device=device).exp() * 1e-3
    if count == 1000:
        g[:300], g[300:400], g[400:410] = 0, 0.5, 1e-41
    expected = quantile_(g.square(), q).item()
    assert kernels.squared_quantile(g, q).item() == expected, (count, q)
    # bounds from a sample: found, missed (sorted values fool the stride), and with no room between them
    if count > 1000:
        assert kernels.squared_quantile(g, q, sample=512, room=2048).item() == expected, q
        assert kernels.squared_quantile(g, q, sample=512, room=16).item() == expected, q
        fooled = torch.zeros_like(g)
        fooled[:: (count // 512) | 1] = 1.0
        fooled[1:9] = torch.arange(8, device=device)
        assert kernels.squared_quantile(fooled, q, sample=512, room=2048).item() == quantile_(fooled.square(), q).item(), q

# the two sweeps
count = 3001
adam = Rule("adam", 1e-3, 0.9, 0.999, 1e-8)
rules = (adam, replace(adam, lr=1.0, rates=(5e-4, 2e-3)), Rule("sgd", 1.0, 0.9, rates=(5e-4, 2e-3)),
         Rule("sgd", 1e-2, 0.9, nesterov=True), Rule("sgd", 1e-2, 0.9), Rule("sgd", 0.01))
for rule, mode, broken in itertools.product(rules, ("fisher", "uniform", "none"), (False, True)):
    if broken and mode != "fisher":
        continue
    results = []
    for run in (lambda f, *a: f(*a), twin):
        torch.manual_seed(1)
        g, p = torch.randn(2, count, device=device)
        teacher, source, var = p.clone(), p + 0.01 * torch.randn(count, device=device), torch.rand(count, device=device)
        state = [torch.zeros(count, device=device) for _ in rule.state_names]
        step, restored = torch.zeros((), device=device), torch.zeros(1, dtype=torch.int32, device=device)
        low = torch.zeros(count, dtype=torch.bfloat16, device=device)
        for i in range(3):
            ok = torch.ones(1, dtype=torch.int32, device=device)
            grad = g * (i + 1)
            if broken and i == 1:
                grad[7] = math.inf
            run(passes.total_gradient_, grad, p, source, var, 1e-3, 1e-6, ok, torch.full((1,), 0.25, device=device))
            threshold = run(passes.squared_quantile, grad, 0.03) if mode == "fisher" else None
            uniform = torch.rand(count, device=device) if mode == "uniform" else None
            rates = torch.linspace(5e-4, 2e-3, count, device=device) if rule.rates else None    # a GPU's sqrt is approximate
            run(
                passes.update_, rule, grad, p, teacher, source, state, step, 0.99, threshold, uniform, 0.1, ok, low,
                restored, rates,
            )
        assert step.item() == 3 - broken
        results.append([p, teacher, low.float(), *state, restored.float(), grad])
    for number, (a, b) in enumerate(zip(*results)):
        assert torch.allclose(a, b, rtol=1e-2 if number == 2 else 1e-5, atol=1e-6), (rule, mode, broken, number)
    assert mode == "none" or 0 < restored.item() < count / 5

# the views
for per_sample, size in itertools.product((False, True), ((8, 8), (9, 12))):
    v, x = Views(per_sample=per_sample), torch.rand(3, 3, *size, device=device)
    source = lambda: ViewSource(x, v, 5, torch.Generator(device).manual_seed(0))
    made = torch.stack(list(views.made_together(source(), [0, 1, 3, 4])))
    plain = torch.stack([source().make(drawn) for drawn in source().draws()])[[0, 1, 3, 4]]
    assert made.shape == plain.shape
    assert (made - plain).abs().max() < 1e-4, (made - plain).abs().max()
# batch norm's last part
for shape in ((3, 64, 7, 9), (1, 32, 1, 1), (2, 96, 16, 5)):
    x = torch.randn(shape, device=device).half().contiguous(memory_format=torch.channels_last)
    constants = torch.randn(4, shape[1], device=device).unbind()
    got = kernels.normalise(x, *constants)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(got.float(), normalise._plain(x, *constants).float(), rtol=2**-9, atol=1e-5), shape
print("agree")
"""


def run(interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs them as they are")
def test_kernels_agree_with_their_twins_in_the_interpreter() -> None:
    result = run(interpret=True)
    assert result.stdout.strip().endswith("agree"), result.stdout + result.stderr


@pytest.mark.gpu
def test_kernels_agree_with_their_twins_on_the_gpu() -> None:
    result = run(interpret=False)
    assert result.stdout.strip().endswith("agree"), result.stdout + result.stderr
