"""Damaged and hostile checkpoints: none loads silently, none runs anything, the older generation takes over."""

import io
import json
import os
import pickle
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from networks import images, network
from petal import DiagonalGaussian, Petal, PetalWarning, Tent
from petal.checkpoint import FORMAT, CheckpointError, Checkpoints, DamagedCheckpoint, digest, load, read_state, save

EACH = 60  # of five kinds: three hundred


class Trap:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def parts(whole: bytes) -> tuple[dict[str, object], bytes]:
    size = struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8 : 8 + size]), whole[8 + size :]


def put_together(header: object, data: bytes, size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def truncated(whole: bytes, draw: random.Random, trap: Path) -> bytes:
    return whole[: draw.choice([draw.randrange(len(whole)), draw.randrange(64), len(whole) - draw.randrange(1, 9)])]


def flipped(whole: bytes, draw: random.Random, trap: Path) -> bytes:
    broken = bytearray(whole)
    for _ in range(draw.choice([1, 1, 3])):
        broken[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
    return bytes(broken)


def wrong_hash(whole: bytes, draw: random.Random, trap: Path) -> bytes:
    """A well-formed file that is not the one that was written: other values, names, text or checksum."""
    header, data = parts(whole)
    about = header["__metadata__"]
    names = [name for name in header if name != "__metadata__"]
    what = draw.randrange(6)
    if what == 0:
        about["sha256"] = draw.randbytes(32).hex()
    elif what == 1:
        about.pop(draw.choice(["sha256", "about", "format"]))
    elif what == 2:
        about["about"] = about["about"].replace('"position": 2', '"position": 3')
    elif what == 3:
        name = draw.choice(names)
        header[name + "x"] = header.pop(name)
    elif what == 4:  # two tensors of the same size change places
        one, other = draw.sample([n for n in names if n.startswith("optimizer.group")], 2)
        header[one], header[other] = header[other], header[one]
    else:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
    return put_together(header, data)


def hostile_header(whole: bytes, draw: random.Random, trap: Path) -> bytes:
    header, data = parts(whole)
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.sample(names, 2)
    start, end = header[name]["data_offsets"]
    what = draw.randrange(10)
    if what == 0:
        return put_together(header, data, size=draw.choice([2**64 - 1, 2**63, 2**40, len(whole), 0]))
    if what == 1:
        header[name]["data_offsets"] = list(header[other]["data_offsets"])  # overlapping
    elif what == 2:
        header[name]["data_offsets"] = [start, end + draw.choice([1, 2**20, 2**62])]
    elif what == 3:
        header[name]["data_offsets"] = [end + 1, start]
    elif what == 4:
        header[name]["dtype"] = draw.choice(["F64", "I8", "BOOL", "object", "F32" if end - start == 8 else "U16", ""])
    elif what == 5:
        header[name]["shape"] = draw.choice([[2**63, 2**63], [-1], [2**40], [1] * 10_000, "x", None])
    elif what == 6:
        return struct.pack("<Q", 400_000) + b'{"a":' * 80_000 + data  # deep
    elif what == 7:
        header = draw.choice([[], 7, None, "x", {"__metadata__": {"format": FORMAT}}, {"__metadata__": 3}])
    elif what == 8:
        header["__metadata__"]["about"] = draw.choice([3, None, [1], {"a": 1}])
    else:
        return struct.pack("<Q", 64) + draw.randbytes(64) + data
    return put_together(header, data)


def pickled(whole: bytes, draw: random.Random, trap: Path) -> bytes:
    content, out = Trap(trap / str(draw.random())), io.BytesIO()
    what = draw.randrange(4)
    if what == 0:
        return pickle.dumps(content, protocol=draw.randrange(6))
    if what == 1:
        torch.save({"state": content}, out)
    elif what == 2:
        torch.save({"state": content}, out, _use_new_zipfile_serialization=False)
    else:
        return whole[:8] + pickle.dumps(content) + whole[8:]
    return out.getvalue()


KINDS: dict[str, Callable[[bytes, random.Random, Path], bytes]] = {
    "truncated": truncated, "flipped": flipped, "wrong hash": wrong_hash, "hostile header": hostile_header,
    "pickled": pickled,
}  # fmt: skip


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("kind", KINDS)
def test_the_older_generation_takes_over(kind: str, tmp_path: Path) -> None:
    model, x = network(), [images(seed=i) for i in range(3)]
    written, trap = Tent(model, lr=0.01), tmp_path / "trap"
    trap.mkdir()
    kept, states = Checkpoints(tmp_path / "kept"), []
    for position in (1, 2):
        written(x[position])
        kept.save(written, {"position": position})
        kept.wait()
        states.append(written.state_dict())
    newest, older = kept.paths()
    whole = newest.read_bytes()
    adapter = Tent(model, lr=0.01)
    assert load(adapter, newest) == {"position": 2}
    assert same(adapter.state_dict(), states[1])
    draw, seen = random.Random(kind), {whole}
    while len(seen) <= EACH:
        broken = KINDS[kind](whole, draw, trap)
        if broken in seen:
            continue
        seen.add(broken)
        newest.write_bytes(broken)
        adapter = Tent(model, lr=0.01)
        fresh, drawn = adapter.state_dict(), torch.get_rng_state()
        with pytest.raises(DamagedCheckpoint, match=newest.name):
            load(adapter, newest)
        assert same(adapter.state_dict(), fresh)
        assert torch.equal(torch.get_rng_state(), drawn)
        with pytest.warns(PetalWarning, match=f"{newest.name} is (damaged|not a petal checkpoint)"):
            assert kept.load_latest(adapter) == {"position": 1}
        assert same(adapter.state_dict(), states[0])
    assert not list(trap.iterdir())
    older.write_bytes(broken)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert kept.load_latest(adapter) is None
    assert len(told) == 2


def test_the_trap_is_a_real_one(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "trap")))
    assert (tmp_path / "trap").exists()


def forged(path: Path, state: dict[str, Tensor], about: object) -> None:
    """A file with a right checksum, by someone who knows how it is made."""
    text = about if isinstance(about, str) else json.dumps(about)
    save_file(state, path, metadata={"format": FORMAT, "about": text, "sha256": digest(state, text)})


def test_forged_content_changes_nothing(tmp_path: Path) -> None:
    """A checksum is no signature: a forged file may pass it. What does not fit is refused, and leaves all as it was."""
    model = network()
    adapter = Petal(model, DiagonalGaussian.isotropic(model, 0.1), views=1)
    adapter(images())
    path, bad = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save(adapter, path)
    about, state = read_state(path)
    weight = next(key for key in state if key.startswith("model."))
    moment = next(key for key in state if key.endswith("exp_avg"))
    changes: list[dict[str, Tensor | None]] = [
        {"generator": torch.full_like(state["generator"], 255)},
        {"random.cpu": torch.full_like(state["random.cpu"], 255)},
        {"random.cpu": torch.zeros(3)},
        {weight: state[weight].double()},
        {weight: state[weight][:1].clone()},
        {weight: None},
        {"model.more": torch.zeros(2)},
        {moment: torch.zeros(7)},
        {"optimizer.state.no.such.exp_avg": torch.zeros(1)},
        {"optimizer.group.9.lr": torch.zeros(())},
    ]
    adapter(images(seed=1))  # elsewhere by now, so that half a load would show
    torch.rand(1)
    before, drawn = adapter.state_dict(), torch.get_rng_state()
    for change in changes:
        forged(bad, {k: v for k, v in {**state, **change}.items() if v is not None}, about)
        with pytest.raises(CheckpointError, match=r"b\.safetensors"):
            load(adapter, bad)
        assert same(adapter.state_dict(), before), list(change)
        assert torch.equal(torch.get_rng_state(), drawn)
    for other in ("[" * 100_000, "[]", "3", "{", '{"method": 3}', json.dumps({**about, "extra": [1]}), json.dumps({"a": 1})):
        forged(bad, state, other)
        with pytest.raises(DamagedCheckpoint, match=r"b\.safetensors"):
            load(adapter, bad)
        forged(tmp_path / "checkpoint-1.safetensors", state, other)
        with pytest.warns(PetalWarning, match="is damaged"):
            assert Checkpoints(tmp_path).load_latest(adapter, lambda extra: extra["position"] > 0) is None
    assert same(adapter.state_dict(), before)
