"""Streams: what arrives at test time, in which order, one batch at a time.

A `Stream` is a plan and nothing else: a list of `Segment`s, each one domain with its number of images, the order they
arrive in and how to load them. Batches are cut out of segments and never cross from one to the next. Everything random
is drawn from the seed and a place in the plan, so any batch can be made without making those before it: `stream.at(p)`
starts there at once, and gives the same batches as a stream that was not interrupted.

A corrupted image depends only on seed, corruption, severity and its index in the dataset, not on the batch size or on
where in the stream it arrives.

To add a stream, write a function that makes the segments and hands them to `Stream`, and add it to `STREAMS`:

    def backwards(data, order=None, *, severity=5, **options):
        builder = StreamBuilder(data, **options)
        segments = [builder.segment(name, severity) for name in reversed(builder.names(order))]
        return builder.stream("backwards", segments, severity=severity)
"""

from collections.abc import Callable

from petal.data.streams.builder import CLEAN, Options, Order, StreamBuilder
from petal.data.streams.correlated import correlated, correlated_order, markov, markov_order
from petal.data.streams.domains import continual, gradual, gradual_pairs, own, recurring, single
from petal.data.streams.mixtures import MIXED, blended, mixed
from petal.data.streams.stream import Batch, Loaded, Segment, Stream
from petal.errors import renamed

__all__ = [
    "CLEAN", "MIXED", "STREAMS", "Batch", "Loaded", "Options", "Order", "Segment", "Stream", "StreamBuilder", "blended",
    "continual", "correlated", "correlated_order", "gradual", "gradual_pairs", "markov", "markov_order", "mixed", "own",
    "recurring", "single",
]  # fmt: skip

STREAMS: dict[str, Callable[..., Stream]] = {
    make.__name__: make for make in (single, continual, gradual, mixed, correlated, markov, recurring, blended, own)
}
__getattr__ = renamed(__name__, Setup=StreamBuilder)
