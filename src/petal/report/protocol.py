"""How a table's runs were evaluated, in one line: what numbers of different papers usually differ in."""

from collections.abc import Mapping
from typing import Any

_STREAMS = {"gradual": "severity rises and falls", "markov": "labels in runs (a Markov chain)"}


def protocol_line(manifest: Mapping[str, Any]) -> str:
    """The protocol of a run, by its manifest.

    >>> protocol_line({"stream": "continual", "severity": 5, "images": 2000, "batch_size": 200, "protocol": "table1-2000",
    ...                "network": "wrn-28-10", "weights": {"sha256": "1ea0dc9d49846d22"}})
    'Protocol table1-2000: continual, severity 5, first 2,000 images of each domain, batches of 200, answers before the \
update, wrn-28-10 with checkpoint 1ea0dc9d4984.'
    """
    given = manifest.get
    known = str(given("stream") or "continual")
    stream = f"{given('visits')} visits of every domain" if given("visits") else _STREAMS.get(known, "continual")
    if given("label_correlation"):
        stream = f"labels in runs (Dirichlet {given('label_correlation'):g})"
    if given("mean_run"):
        stream += f" of {given('mean_run'):g} images on average"
    more = [f"{name} {given(name)}" for name in ("stretch", "alternate", "sources", "frames") if given(name)]
    if given("reset_per_domain"):
        more.append("every method reset when the domain changes")
    if given("shuffle"):
        more.append("images shuffled")
    if given("severity") is not None and known != "gradual":
        more.append(f"severity {given('severity')}")
    images = given("images")
    more.append("all images of each domain" if images is None else f"first {images:,} images of each domain")
    if given("batch_size"):
        more.append(f"batches of {given('batch_size')}")
    more.append(f"answers {'after' if given('after') else 'before'} the update")
    if given("rate"):
        period = given("rate_source_ms", 0) / given("rate")
        more.append(f"a batch every {period:.3g} ms ({given('rate'):g} x the source's speed)")
    if given("stream_seed"):
        more.append(f"stream seed {given('stream_seed')}")
    if given("preprocessing"):
        more.append(str(given("preprocessing")))
    weights = given("weights")
    digest = str(weights.get("sha256") or "")[:12] if isinstance(weights, Mapping) else ""
    network = [str(given("network") or ""), f"checkpoint {digest}" if digest else ""]
    more += [" with ".join(filter(None, network))] if any(network) else []
    return f"Protocol {given('protocol') or 'without a name'}: {', '.join([stream, *more])}."
