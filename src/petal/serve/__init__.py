"""An adaptive inference server: the Open Inference Protocol in front of a network that keeps adapting.

    settings   everything that can be set, from options or one TOML file
    model      the adapter, its guard and the frozen source, from settings
    queue      requests on their way to the worker: bounded, in order, taken in batches
    worker     the one thread that owns the weights: batches, versions, admin actions, checkpoints
    versions   snapshots of the adapter that can be listed and rolled back to
    watch      numbers for Prometheus and the live page
    logs       JSON lines, and the audit log
    inputs     requests to tensors, and everything that can be wrong with one
    wire       answers and refusals in the protocol's words
    http       connections: time and size limits before anything is read
    rest, rpc  the protocol over HTTP and gRPC, on KServe's types
    admin      the second port: token, versions, the live page
    server     all of it in one process, from start to SIGTERM

All but `settings` need the extra `petal-tta[serve]`.
"""

from petal.serve.settings import Settings, of_source, read_toml

__all__ = ["Settings", "of_source", "read_toml"]
