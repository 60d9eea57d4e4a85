"""A pass over compiled networks: what goes together around a convolution becomes one operator.

torch.compile hands it the network in elementary operations, so that it needs to know no architecture. It looks for

    conv [+ residual] -> its mean and variance over batch and pixels      (`convolution`)
    relu of (x - mean) * rstd * weight + bias -> conv                     (`normalise`)

and leaves everything else, and everything for which the kernel does not fit or cuDNN is faster, to the compiler.
"""

import logging
import operator
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from petal.engine import convolution, normalise
from petal.engine.policy import side_stream, side_streams

log = logging.getLogger(__name__)

aten = torch.ops.aten
converted = torch.ops.prims.convert_element_type.default
FILES = ("fusion.py", "convolution.py", "convolution.cu", "normalise.py")
BYTES_A_SECOND = 3e12  # of memory, about: what is read and written once less counts in the kernel's favour


class FuseConvolutions(CustomGraphPass):
    """The pass. `choose` says how wide the kernel's tiles are for a convolution, 0 if it is not to be used."""

    def __init__(self, choose: Callable[..., int] | None = None) -> None:
        self.choose = choose or fastest_columns

    def uuid(self) -> Any:
        """What the compiler's cache knows it by."""
        files = tuple(str(Path(__file__).with_name(name)) for name in FILES)
        return get_hash_for_files(files, extra=getattr(self.choose, "__qualname__", ""))

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph in place."""
        for node in [node for node in graph.nodes if node.target == aten.relu.default]:
            _normalise(graph, node)
        candidates = [node for node in graph.nodes if _is_convolution(node)]
        for node in sorted(candidates, key=_work, reverse=True):  # of two that are added, the larger takes the other
            self._fuse(graph, node)
        graph.eliminate_dead_code()

    def _fuse(self, graph: fx.Graph, node: fx.Node) -> None:
        args: Any = node.args
        x, weight, _, (stride, _), padding, *_ = args
        end, residual = _sum(node)
        moments = _moments(end)
        columns = self.choose(x.meta["val"], weight.meta["val"], stride, padding, residual is not None, bool(moments))
        if not columns:
            return
        with graph.inserting_before(end):
            both = _call(
                graph, torch.ops.petal.convolution.default, x, weight, residual, stride, padding, bool(moments), columns
            )
            out = _call(graph, operator.getitem, both, 0)
            if moments:
                mean, var = _mean_and_variance(graph, _call(graph, operator.getitem, both, 1), out)
        for var_mean in moments:
            for user in list(var_mean.users):
                user.replace_all_uses_with(var if user.args[1] == 0 else mean)
        end.replace_all_uses_with(out)


def _normalise(graph: fx.Graph, relu: fx.Node) -> None:
    """Let one operator stand for a batch norm's last part, where a convolution reads the result from memory."""
    if not any(user.target == aten.convolution.default for user in relu.users):
        return
    shifted, _ = _parts(relu.args[0], converted)
    scaled, bias = _parts(shifted, aten.add.Tensor)
    product, weight = _parts(scaled, aten.mul.Tensor)
    centred, rstd = _parts(product, aten.mul.Tensor)
    x, mean = _parts(centred, aten.sub.Tensor)
    x = _parts(x, converted)[0] or x
    nodes = (x, mean, rstd, weight, bias)
    values = _values(nodes)
    if values and values[0].dtype == relu.meta["val"].dtype and normalise.fits(*values):
        with graph.inserting_before(relu):
            relu.replace_all_uses_with(_call(graph, torch.ops.petal.normalise.default, *nodes))


def _parts(node: Any, target: Any) -> tuple[Any, Any]:
    """The two arguments of a node with this target, or nothing."""
    if isinstance(node, fx.Node) and node.target == target and len(node.args) == 2 and not node.kwargs:
        return node.args[0], node.args[1]
    return None, None


def _values(nodes: Sequence[Any]) -> list[Tensor]:
    """What the nodes give, on tensors without data; nothing if one of them gives no tensor."""
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    return values if all(isinstance(v, Tensor) for v in values) else []  # type: ignore[return-value]


def _is_convolution(node: fx.Node) -> bool:
    if node.target != aten.convolution.default:
        return False
    args: Any = node.args
    x, weight, bias, stride, _, dilation, transposed, *_ = args
    if bias is not None or transposed or list(dilation) != [1, 1] or len(set(stride)) != 1:
        return False
    values = _values((x, weight, node))
    return bool(values) and convolution.fits(*values)


def _work(node: fx.Node) -> int:
    weight: Any = node.args[1]
    return int(node.meta["val"].numel() * weight.meta["val"][0].numel())


def _sum(node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Where the convolution's result is added to another of its kind: that sum, and the other."""
    users = list(node.users)
    first, second = _parts(users[0], aten.add.Tensor) if len(users) == 1 else (None, None)
    other = second if first is node else first
    values = _values((node, other))
    if values and other is not node:
        like, value = values
        if value.shape == like.shape and value.dtype == like.dtype and value.stride() == like.stride():
            return users[0], other
    return node, None


def _moments(end: fx.Node) -> list[fx.Node]:
    """Who takes mean and variance of it in float32 over batch and pixels."""
    found = []
    for cast in end.users:
        if cast.target != converted or cast.args[1] != torch.float32:
            continue
        for user in cast.users:
            over: Any = user.args[1] if len(user.args) > 1 else None
            if (
                user.target == aten.var_mean.correction
                and list(over or ()) == [0, 2, 3]
                and user.kwargs.get("correction") == 0
                and user.kwargs.get("keepdim")
                and all(u.target is operator.getitem for u in user.users)
            ):
                found.append(user)
    return found


def _mean_and_variance(graph: fx.Graph, sums: fx.Node, out: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Of each channel, [1, C, 1, 1], from the sums over groups of pixels [groups, 2, C].

    A variance by the difference of two means loses what float16 has lost already: the rounding of single values to eleven
    bits weighs as much as that of their sums to twenty-four.
    """
    value = out.meta["val"]
    total = _call(graph, aten.sum.dim_IntList, sums, [0])
    means = _call(graph, aten.mul.Tensor, total, value.shape[1] / value.numel())
    mean, square = (_call(graph, aten.select.int, means, 0, i) for i in range(2))
    var = _call(graph, aten.sub.Tensor, square, _call(graph, aten.mul.Tensor, mean, mean))
    var = _call(graph, aten.clamp_min.default, var, 0.0)
    shape = [1, value.shape[1], 1, 1]
    return _call(graph, aten.view.default, mean, shape), _call(graph, aten.view.default, var, shape)


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A new node, with what it will give on tensors without data."""
    node = graph.call_function(target, args)
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
    mode = next((getattr(v, "fake_mode", None) for v in values if isinstance(v, Tensor)), None)
    with mode or nullcontext():
        node.meta["val"] = target(*values)
    return node


# Which of the two is faster


def fastest_columns(x: Tensor, weight: Tensor, stride: int, padding: Sequence[int], residual: bool, moments: bool) -> int:
    """The width of the kernel's tiles that is best on this GPU, or 0 where cuDNN's convolution is better."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != 9:
        return 0
    try:
        return _measured(x.device, x.dtype, tuple(x.shape), tuple(weight.shape), stride, tuple(padding), residual, moments)
    except convolution.KernelError as error:
        log.warning("a convolution is left to cuDNN: %s", error)
        return 0


@cache
def _measured(
    device: torch.device, dtype: torch.dtype, images: tuple[int, ...], filters: tuple[int, ...], stride: int,
    padding: tuple[int, ...], residual: bool, moments: bool,
) -> int:  # fmt: skip
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        random = torch.Generator(device).manual_seed(0)
        x, weight = (
            torch.randn(shape, generator=random, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
            for shape in (images, filters)
        )
        plain: Callable[[], Any] = partial(F.conv2d, x, weight, stride=stride, padding=padding)
        out = plain()
        other = out if residual else None
        saved = out.nbytes * (2 * residual + moments) / BYTES_A_SECOND * 1e3
        times = {0: _milliseconds(plain, device) + saved}
        for columns in convolution.widths(weight):
            ours = partial(convolution.convolution, x, weight, other, stride, padding, moments, columns)
            times[columns] = _milliseconds(ours, device)
    best = min(times, key=times.__getitem__)
    shown = ", ".join(f"{columns or 'cuDNN'} {ms:.3f}" for columns, ms in times.items())
    log.info("convolution %s by %s: %s ms", list(images), list(filters), shown)
    return best


def _milliseconds(body: Callable[[], Any], device: torch.device, repeat: int = 10) -> float:
    """Of one call, by the device's clock. A graph keeps the host's part out of it."""
    with side_streams, torch.cuda.stream(side := side_stream(device.index)):
        side.synchronize()
        body()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(repeat):
                body()
        times: list[float] = []
        for _ in range(4):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            graph.replay()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / repeat)
    return statistics.median(times[1:])
