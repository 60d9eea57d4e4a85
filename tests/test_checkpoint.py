import errno
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import petal
from networks import ConvNet
from petal import (
    Adapter,
    BatchNorm,
    ConfigError,
    CoTTA,
    DiagonalGaussian,
    Petal,
    PetalError,
    PetalWarning,
    PseudoLabel,
    Source,
    Tent,
)
from petal.checkpoint import CheckpointError, Checkpoints, DamagedCheckpoint, digest, load, save, to_host


def network(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet("batch").eval()


def adapters() -> dict[str, object]:
    model = network()
    q = DiagonalGaussian.isotropic(model, 0.1)
    return {
        "source": lambda: Source(model),
        "bn": lambda: BatchNorm(model),
        "tent": lambda: Tent(model),
        "cotta": lambda: CoTTA(model, views=3, confidence=2.0, restore=None),
        "petal": lambda: Petal(model, q, views=3, confidence=2.0),
        "petal-sgd": lambda: Petal(
            model, q, views=2, optimizer=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)
        ),
    }


def batches(count: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.rand(6, 3, 8, 8, generator=g) for _ in range(count)]


@pytest.mark.parametrize("name", list(adapters()))
def test_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    make = adapters()[name]
    straight, first, second = make(), make(), make()
    x = batches(5)
    expected = [straight(b) for b in x]
    for b in x[:3]:
        first(b)
    save(first, tmp_path / "a.safetensors", {"position": 3, "note": "ü"})
    assert load(second, tmp_path / "a.safetensors") == {"position": 3, "note": "ü"}
    for b, logits in zip(x[3:], expected[3:], strict=True):
        assert torch.equal(second(b), logits)
    for key, value in straight.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_refuses_other_source_posterior_method_and_network(tmp_path: Path) -> None:
    model, other = network(0), network(1)
    q = DiagonalGaussian.isotropic(model, 0.1)
    path = tmp_path / "a.safetensors"
    save(Petal(model, q, views=1), path)
    for wrong, word in (
        (Petal(model, DiagonalGaussian.isotropic(other, 0.1), views=1), "other source weights or posterior"),
        (Petal(model, DiagonalGaussian.isotropic(model, 0.2), views=1), "other source weights or posterior"),
        (CoTTA(model, views=1), "checkpoint of Petal"),
    ):
        before = wrong.state_dict()
        with pytest.raises(CheckpointError, match=word):
            load(wrong, path)
        assert same_state(before, wrong.state_dict())
    save(Tent(model), path)
    with pytest.raises(CheckpointError, match="other source weights"):
        load(Tent(other), path)
    with pytest.raises(CheckpointError, match="another network"):
        load(Tent(network().double()), path)


def test_statistics_of_the_source_and_the_damping_of_its_posterior_belong_to_it(tmp_path: Path) -> None:
    model, other = network(), network()
    other.norm1.running_mean.add_(0.5)
    q = DiagonalGaussian.isotropic(model, 0.1)
    damped = DiagonalGaussian(q.mean, q.var, damping=1e-3, buffers=q.buffers)
    for mine, theirs in ((Source(model), Source(other)), (Petal(model, q, views=1), Petal(model, damped, views=1))):
        save(mine, tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError, match="other source weights"):
            load(theirs, tmp_path / "a.safetensors")


def test_statistics_of_a_source_network_that_move_count_by_where_they_started(tmp_path: Path) -> None:
    """PeTTA's source network keeps statistics of its own; a checkpoint of the middle of a stream is its own."""
    model = network()
    known = petal.collect_statistics(model, [batches(1)[0]], ["prototypes"], labels="predicted", batch_statistics=False)
    adapter = petal.PeTTA(model, known, memory=8)
    for x in batches(3):
        adapter(x)
    save(adapter, tmp_path / "a.safetensors")
    load(petal.PeTTA(model, known, memory=8), tmp_path / "a.safetensors")


def test_what_a_method_adds_to_the_network_is_no_part_of_the_source(tmp_path: Path) -> None:
    """RMT's projector begins at random numbers of the adapter's own."""
    model = network()
    known = petal.collect_statistics(model, [batches(1)[0]], ["prototypes"], labels="predicted")
    adapter, other = (petal.RMT(model, known, seed=seed) for seed in (0, 1))
    adapter(batches(1)[0])
    save(adapter, tmp_path / "a.safetensors")
    load(other, tmp_path / "a.safetensors")
    assert same_state(adapter.state_dict(), other.state_dict())


def test_copies_that_are_left_out_give_their_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many snapshots come while one is written, three places in host memory serve for them."""
    adapter, free, places = Source(network()), threading.Event(), set()
    to_host, write = petal.checkpoint.to_host, petal.checkpoint.write_state

    def counted(state: dict[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        buffers.setdefault("number", torch.tensor(len(places)))
        places.add(int(buffers["number"]))
        return to_host(state, buffers)

    def slow(*args: object) -> None:
        assert free.wait(60)
        write(*args)

    monkeypatch.setattr(petal.checkpoint, "to_host", counted)
    monkeypatch.setattr(petal.checkpoint, "write_state", slow)
    with Checkpoints(tmp_path) as kept:
        for number in range(6):
            kept.save(adapter, {"number": number})
        free.set()
    assert len(places) <= 3


class Moving(PseudoLabel):
    """Running statistics follow the batches, as weights do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.model.register_buffer("seen", model.conv1.weight.detach().mean((1, 2, 3)))
        self.register_statistics("model")

    def step(self, x: Tensor) -> Tensor:
        self.model.seen.mul_(0.9)
        return super().step(x)


@pytest.mark.parametrize("make", [Tent, PseudoLabel, Moving])
def test_weights_and_statistics_that_adapt_are_part_of_the_source(
    make: Callable[[torch.nn.Module], Adapter], tmp_path: Path
) -> None:
    """By where they started, whenever the first checkpoint is written."""
    model, other = network(), network()
    adapter = make(model)
    adapter(batches(1)[0])
    save(adapter, tmp_path / "a.safetensors")
    load(make(model), tmp_path / "a.safetensors")
    with torch.no_grad():
        other.norm1.bias.add_(0.5)
    with pytest.raises(CheckpointError, match="other source weights"):
        load(make(other), tmp_path / "a.safetensors")


def test_source_is_recognised_after_adapting(tmp_path: Path) -> None:
    """The fingerprint is of where an adapter started, not of where it is."""
    model = network()
    a, b = Tent(model, lr=0.1), Tent(model, lr=0.1)
    a(batches(1)[0])
    save(a, tmp_path / "a.safetensors")
    load(b, tmp_path / "a.safetensors")
    assert same_state(a.state_dict(), b.state_dict())


def test_every_flipped_byte_and_truncation_is_noticed(tmp_path: Path) -> None:
    adapter = Petal(network(), DiagonalGaussian.isotropic(network(), 0.1), views=1)
    adapter(batches(1)[0])
    path, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(adapter, path, {"position": 1})
    whole = path.read_bytes()
    before = adapter.state_dict()
    positions = torch.randint(0, len(whole), (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for position in positions:
        broken = bytearray(whole)
        broken[position] ^= 0x10
        bad.write_bytes(broken)
        with pytest.raises(DamagedCheckpoint):
            load(adapter, bad)
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        bad.write_bytes(whole[:size])
        with pytest.raises(DamagedCheckpoint):
            load(adapter, bad)
    assert same_state(before, adapter.state_dict())


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("/tmp/petal-bomb-must-not-exist",)


def test_names_types_shapes_and_values_are_in_the_checksum(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2, 2)}
    others: list[dict[str, Tensor]] = [
        {"a": torch.zeros(4), "c": torch.zeros(2, 2)}, {"a": torch.zeros(4, dtype=torch.int32), "b": torch.zeros(2, 2)},
        {"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": -torch.zeros(4), "b": torch.zeros(2, 2)},
    ]  # fmt: skip
    assert digest(tensors) == digest(dict(reversed(tensors.items())))
    assert len({digest(tensors), digest(tensors, "text"), *map(digest, others)}) == 6
    path = tmp_path / "checkpoint"
    save(Tent(network()), path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"I32"'))     # the same bytes, read as other numbers
    with pytest.raises(DamagedCheckpoint, match="checksum"):
        load(Tent(network()), path)


def test_foreign_files_are_refused_and_never_run(tmp_path: Path) -> None:
    adapter = Source(network())
    bad = tmp_path / "x.safetensors"
    bad.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DamagedCheckpoint):
        load(adapter, bad)
    assert not Path("/tmp/petal-bomb-must-not-exist").exists()
    save_file({"a": torch.zeros(2)}, bad)
    with pytest.raises(DamagedCheckpoint, match="not a petal checkpoint"):
        load(adapter, bad)
    with pytest.raises(CheckpointError, match="no such file"):
        load(adapter, tmp_path / "missing.safetensors")
    with pytest.raises(PetalError, match="cannot write"):
        save(adapter, tmp_path / "no-folder" / "a.safetensors")


def test_two_generations_and_falling_back(tmp_path: Path) -> None:
    model = network()
    adapter, kept = Tent(model), Checkpoints(tmp_path)
    assert kept.latest() is None
    assert kept.load_latest(adapter) is None
    for position, x in enumerate(batches(3)):
        adapter(x)
        kept.save(adapter, {"position": position})
        kept.wait()
    newest, older = kept.paths()
    assert len(list(tmp_path.iterdir())) == 2
    assert kept.latest() == newest
    assert kept.load_latest(Tent(model)) == {"position": 2}
    assert kept.load_latest(Tent(model), lambda extra: extra["position"] < 2) == {"position": 1}
    newest.write_bytes(newest.read_bytes()[:-7])
    with pytest.warns(PetalWarning, match=f"{newest.name} is damaged"):
        assert kept.latest() == older
    with pytest.warns(PetalWarning, match=f"{newest.name} is damaged"):
        assert kept.load_latest(Tent(model)) == {"position": 1}
    with pytest.raises(CheckpointError, match="other source"), pytest.warns(PetalWarning):
        kept.load_latest(Tent(network(1)))  # whole, but of another network: no falling back
    kept.save(adapter, {"position": 3})  # the damaged one does not count as a generation: the good one stays
    kept.wait()
    assert [p.name for p in kept.paths()] == ["checkpoint-4.safetensors", older.name]
    (tmp_path / ".checkpoint-9.safetensors.1.tmp").touch()
    kept.clear()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="at least 2"):
        Checkpoints(tmp_path, keep=1)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        Checkpoints(tmp_path / "file" / "folder")


def test_keeps_as_many_as_asked_for_and_nothing_else(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=3)
    (tmp_path / ".checkpoint-1.safetensors.0123.tmp").touch()  # as a killed process leaves it
    (tmp_path / ".tmpMJBEUN").touch()                          # and safetensors in it
    (tmp_path / "notes.txt").touch()
    (tmp_path / ".tmp-notes").touch()
    for _ in range(5):
        kept.save(Source(network()))
        kept.wait()
    assert [p.name[11:12] for p in kept.paths()] == ["5", "4", "3"]
    assert len(list(tmp_path.iterdir())) == 5


# -- in the background -------------------------------------------------------------------------------------------------


class Gate:
    """Holds the writer at its first file until it is opened, and remembers what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open, self.written = threading.Event(), threading.Event(), []
        original = petal._files.save_file

        def slow(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
            self.reached.set()
            assert self.open.wait(30)
            self.written.append(json.loads(metadata["about"])["extra"]["position"])
            assert threading.current_thread() is not threading.main_thread()
            original(tensors, path, metadata)

        monkeypatch.setattr(petal._files, "save_file", slow)


def test_writes_a_copy_while_the_adapter_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state of the call, whatever the adapter and the caller's `extra` become meanwhile."""
    gate = Gate(monkeypatch)
    model, x = network(), batches(6)
    adapter = Petal(model, DiagonalGaussian.isotropic(model, 0.1), lr=0.01, views=2, confidence=2.0)
    states, extra = [], {"position": 0}
    with Checkpoints(tmp_path) as kept:
        for batch in x:
            adapter(batch)
            extra["position"] += 1
            kept.save(adapter, extra)
            states.append(adapter.state_dict())
            assert gate.reached.wait(30)  # the first is being written: all others find the writer busy
        assert not kept.paths()
        extra["position"] = 99
        gate.open.set()
    assert gate.written == [1, 6]  # one in flight, one pending, and the newest wins
    for path, position in zip(kept.paths(), (6, 1), strict=True):
        again = Petal(model, DiagonalGaussian.isotropic(model, 0.1), lr=0.01, views=2, confidence=2.0)
        assert load(again, path) == {"position": position}
        assert same_state(again.state_dict(), states[position - 1])
    assert not [t for t in threading.enumerate() if t.name == "petal-checkpoints"]


def test_clear_and_load_wait_for_the_writer(tmp_path: Path) -> None:
    adapter, kept = Tent(network()), Checkpoints(tmp_path)
    for position in range(20):
        kept.save(adapter, {"position": position})
    assert kept.load_latest(adapter) == {"position": 19}
    kept.save(adapter)
    kept.clear()
    assert not list(tmp_path.iterdir())


def test_without_a_thread_the_caller_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    kept = Checkpoints(tmp_path)
    kept.save(Source(network()), {"position": 1})
    assert kept.load_latest(Source(network())) == {"position": 1}


def test_one_path_written_by_many_threads(tmp_path: Path) -> None:
    """Each writes a file of its own; one of them stays, whole."""
    model = network()
    adapters = [Tent(model, lr=0.01 * i) for i in range(8)]
    for a in adapters:
        a(batches(1)[0])
    path = tmp_path / "a.safetensors"

    def write(number: int) -> None:
        for _ in range(10):
            save(adapters[number], path, {"n": number})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    again = Tent(model)
    number = load(again, path)["n"]
    assert same_state(again.state_dict(), adapters[number].state_dict())
    assert len(list(tmp_path.iterdir())) == 1


# -- disks that fail ---------------------------------------------------------------------------------------------------


def failing_save(error: Exception, half: bool):
    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if half:
            Path(path).write_bytes(b"half a file")
        raise error

    return save_file


FAILURES = {
    "No space left on device": (SafetensorError("I/O error: No space left on device (os error 28)"), True),
    "Read-only file system": (OSError(errno.EROFS, "Read-only file system", ".checkpoint-2.tmp"), False),
    "Input/output error": (OSError(errno.EIO, "Input/output error"), True),
    "no room for the copy": (MemoryError("no room for the copy"), False),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_disk_is_told_once_and_nothing_is_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, x = Tent(network(), lr=0.01), batches(8)
    kept = Checkpoints(tmp_path)
    adapter(x[0])
    kept.save(adapter, {"position": 1})
    kept.wait()
    good = {p: p.read_bytes() for p in tmp_path.iterdir()}
    error, half = FAILURES[name]
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(petal._files, "save_file", failing_save(error, half))
        for position in range(2, 6):
            adapter(x[position])
            kept.save(adapter, {"position": position})
            kept.wait()
            assert kept.error is not None
        patch.setattr(petal._files, "save_file", failing_save(OSError(errno.EDQUOT, "Disk quota exceeded"), half))
        for _ in range(2):
            kept.save(adapter, {"position": 6})
            kept.wait()
    words = [str(w.message) for w in told]
    assert len(words) == 2, words
    assert all("goes on" in w and "the last good one stays" in w and str(tmp_path) in w for w in words)
    assert all(issubclass(w.category, PetalWarning) for w in told)
    assert name in words[0]
    assert "Disk quota exceeded" in words[1]
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == good
    kept.save(adapter, {"position": 7})  # there is room again
    kept.wait()
    assert kept.error is None
    assert kept.load_latest(Tent(network(), lr=0.01)) == {"position": 7}
    monkeypatch.setattr(petal._files, "save_file", failing_save(error, half))
    kept.save(adapter)
    with pytest.warns(PetalWarning, match="goes on"):  # and again there is none
        kept.close()


def test_a_vanished_folder_is_told_and_may_come_back(tmp_path: Path) -> None:
    adapter, kept = Tent(network()), Checkpoints(tmp_path / "kept")
    kept.save(adapter, {"position": 1})
    kept.wait()
    (tmp_path / "kept").rename(tmp_path / "away")
    kept.save(adapter)
    with pytest.warns(PetalWarning, match="No such file or directory"):
        kept.wait()
    adapter(batches(1)[0])
    kept.save(adapter)
    kept.wait()  # it is told once
    assert not (tmp_path / "kept").exists(), "where a disk was to be, nothing must be written"
    (tmp_path / "away").rename(tmp_path / "kept")
    assert kept.load_latest(adapter) == {"position": 1}
    kept.save(adapter, {"position": 2})
    kept.wait()
    assert kept.load_latest(adapter) == {"position": 2}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a read-only folder")
def test_a_real_read_only_folder(tmp_path: Path) -> None:
    adapter, kept = Tent(network()), Checkpoints(tmp_path)
    kept.save(adapter, {"position": 1})
    kept.wait()
    tmp_path.chmod(0o500)
    try:
        kept.save(adapter, {"position": 2})
        with pytest.warns(PetalWarning, match="Permission denied"):
            kept.close()
        assert kept.load_latest(adapter) == {"position": 1}
    finally:
        tmp_path.chmod(0o700)


LIMITED = """
import resource, signal, sys, warnings
from pathlib import Path
import torch
from networks import ConvNet
from petal import Tent
from petal.checkpoint import Checkpoints, read_state
warnings.simplefilter("always")
torch.manual_seed(0)
adapter, kept = Tent(ConvNet("batch").eval(), lr=0.01), Checkpoints(sys.argv[1])
x = torch.rand(6, 3, 8, 8)
kept.save(adapter, {"position": 1}); kept.wait()
size = kept.paths()[0].stat().st_size
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
soft = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, soft[1]))
for position in (2, 3):
    adapter(x); kept.save(adapter, {"position": position}); kept.wait()
print([p.name for p in Path(sys.argv[1]).iterdir()], kept.load_latest(adapter))
resource.setrlimit(resource.RLIMIT_FSIZE, soft)
kept.save(adapter, {"position": 4}); kept.close()
print(kept.load_latest(adapter))
"""


def test_a_limit_that_the_system_itself_sets(tmp_path: Path) -> None:
    """A write that really fails half-way, in a process that may not make large files."""
    where = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command, env = [sys.executable, "-c", LIMITED, str(tmp_path)], {**os.environ, "PYTHONPATH": where}
    out = subprocess.run(command, env=env, capture_output=True, text=True)
    assert out.stdout.splitlines() == ["['checkpoint-1.safetensors'] {'position': 1}", "{'position': 4}"], out.stderr
    assert out.stderr.count("PetalWarning") == 1
    assert "File too large" in out.stderr


# -- what is in one ----------------------------------------------------------------------------------------------------


def test_what_goes_along_must_fit_into_json(tmp_path: Path) -> None:
    adapter = Source(network())
    for extra in ({"x": torch.zeros(1)}, {"x": {1, 2}}):
        with pytest.raises(CheckpointError, match="JSON cannot hold"):
            save(adapter, tmp_path / "a.safetensors", extra)
        with pytest.raises(CheckpointError, match="JSON cannot hold"):
            Checkpoints(tmp_path).save(adapter, extra)
    assert not list(tmp_path.iterdir())


def test_the_posterior_and_the_source_are_not_stored_again(tmp_path: Path) -> None:
    """Student, teacher and two moments: four times the parameters, and little else."""
    model = network()
    adapter = Petal(model, DiagonalGaussian.isotropic(model, 0.1), views=1)
    adapter(batches(1)[0])
    save(adapter, tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        sizes = {key: file.get_tensor(key).numel() for key in file.keys()}
    large = {k: n for k, n in sizes.items() if n > 1 and not k.startswith(("random.", "generator"))}
    assert sum(large.values()) == 4 * sum(p.numel() for p in model.parameters())


def noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)  # drawn from torch's own random numbers


def test_augmentations_that_draw_from_torchs_own_numbers_continue_exactly(tmp_path: Path) -> None:
    x = batches(6)

    def make() -> CoTTA:
        return CoTTA(network(), lr=0.01, views=2, confidence=2.0, augment=noise)

    straight, first, second = make(), make(), make()
    torch.manual_seed(3)
    expected = [straight(b) for b in x]
    torch.manual_seed(3)
    for b in x[:3]:
        first(b)
    save(first, tmp_path / "a.safetensors")
    torch.manual_seed(4)
    load(second, tmp_path / "a.safetensors")
    assert all(torch.equal(second(b), logits) for b, logits in zip(x[3:], expected[3:], strict=True))


class Wrapper(torch.nn.Module):
    """A stand-in for anything around an adapter, with state of its own that grows."""

    def __init__(self, adapter: object) -> None:
        super().__init__()
        self.adapter, self.seen = adapter, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean().view(1)])
        return self.adapter(x)

    def state_dict(self) -> dict[str, Tensor]:
        return {"seen": self.seen.clone()} | {f"adapter.{k}": v for k, v in self.adapter.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.seen = state["seen"].clone()
        self.adapter.load_state_dict({k[8:]: v for k, v in state.items() if k.startswith("adapter.")})


def test_wrapped_adapters(tmp_path: Path) -> None:
    model, x = network(), batches(4)
    q = DiagonalGaussian.isotropic(model, 0.1)

    def make() -> Wrapper:
        return Wrapper(Wrapper(Petal(model, q, lr=0.01, views=2, confidence=2.0)))

    straight, first, second = make(), make(), make()
    for b in x:
        straight(b)
    for b in x[:2]:
        first(b)
    with Checkpoints(tmp_path) as kept:
        kept.save(first, {"position": 2})
    assert kept.load_latest(second) == {"position": 2}
    for b in x[2:]:
        second(b)
    assert same_state(second.state_dict(), straight.state_dict())
    with pytest.raises(CheckpointError, match=r"of Wrapper\(Wrapper\(Petal\)\), and this adapter is Wrapper\(Petal\)"):
        kept.load_latest(Wrapper(Petal(model, q)))
    other = Wrapper(Wrapper(Petal(model, DiagonalGaussian.isotropic(model, 0.2))))
    with pytest.raises(CheckpointError, match="other source weights or posterior"):
        kept.load_latest(other)


def test_the_example_of_the_page_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "guides" / "lifelong.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page.split("## Checkpoints")[1].split("\n## ")[0], flags=re.S)
    monkeypatch.chdir(tmp_path)
    code = code.replace("print(", "str(")

    def run(text: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        scope: dict[str, object] = {}
        with suppress(ZeroDivisionError):
            exec(compile(text, "lifelong.md", "exec"), scope)
        return scope["so_far"], scope["adapter"].state_dict()

    cut, _ = run(code.replace("        kept.save(", "        1 / (batch.position < 1)\n        kept.save("))
    again = run(code)
    Checkpoints("state").clear()
    whole = run(code)
    assert (cut["position"], cut["seen"]) == (2, 100)
    assert (whole[0]["position"], whole[0]["seen"]) == (4, 200)
    assert again[0] == whole[0]
    assert same_state(again[1], whole[1])


@pytest.mark.gpu
def test_from_a_gpu_through_the_same_buffers(tmp_path: Path) -> None:
    model = network().cuda()
    adapter = Petal(model, DiagonalGaussian.isotropic(model, 0.1), lr=0.01, views=2, confidence=2.0)
    buffers: dict[str, Tensor] = {}
    places = []
    for _ in range(3):
        adapter(batches(1)[0].cuda())
        state = adapter.state_dict()
        copy = to_host(state, buffers)
        assert all(value.device.type == "cpu" for value in copy.values())
        assert same_state({k: v.cpu() for k, v in state.items()}, copy)
        places.append({k: v.data_ptr() for k, v in buffers.items()})
    assert places[0] == places[1] == places[2] != {}
    with Checkpoints(tmp_path) as kept:
        kept.save(adapter, {"position": 3})
    again = Petal(model, DiagonalGaussian.isotropic(model, 0.1), lr=0.01, views=2, confidence=2.0)
    assert kept.load_latest(again) == {"position": 3}
    assert same_state(again.state_dict(), adapter.state_dict())
    assert torch.equal(again(batches(2)[1].cuda()), adapter(batches(2)[1].cuda()))
