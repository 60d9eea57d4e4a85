"""Every kind of stream over tiny images, and how to compare their batches."""

import torch
from hypothesis import HealthCheck, settings

from petal.data import from_arrays, streams

examples = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = ["fog", "snow", "frost"]
OTHER = from_arrays(torch.rand(5, 3, 4, 4), [0, 1, 0, 1, 1], name="other")
FINITE = {
    "single": lambda data, **o: streams.single(data, "fog", **o),
    "continual": lambda data, **o: streams.continual(data, NAMES, **o),
    "gradual": lambda data, **o: streams.gradual(data, NAMES[:2], **o),
    "mixed": lambda data, **o: streams.mixed(data, NAMES, **o),
    "correlated": lambda data, **o: streams.correlated(data, NAMES, **o),
    "stretches": lambda data, **o: streams.correlated(data, NAMES, stretch=4, **o),
    "alternating": lambda data, **o: streams.correlated(data, NAMES, alternate=1, **o),
    "interleaved": lambda data, **o: streams.correlated(data, NAMES, sources=3, **o),
    "markov": lambda data, **o: streams.markov(data, NAMES, run=3, **o),
    "recurring": lambda data, **o: streams.recurring(data, NAMES, visits=2, **o),
    "own": lambda data, **o: streams.own([("a", data), ("b", OTHER)], **o),
}
ALL = {**FINITE, "blended": lambda data, **o: streams.blended(data, NAMES, drift=17, **o)}


def same(a, b):
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert torch.equal(a.index, b.index)
    for name in ("domain", "severity", "position", "domain_changed", "visit", "domains", "strengths", "stream"):
        assert getattr(a, name) == getattr(b, name), name


def by_image(stream):
    """{(domain, severity, visit, index): image}; an image that comes again must be the same again."""
    images = {}
    for batch in stream:
        for k, domain in enumerate(batch.domains):
            key = (domain, batch.severity, batch.visit, int(batch.index[k]))
            assert torch.equal(images.setdefault(key, batch.x[k]), batch.x[k])
    return images
