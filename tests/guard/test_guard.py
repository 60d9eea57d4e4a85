"""The guard, on a network whose logits are its input: what student and source say is set by hand."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import petal
from networks import images, network
from petal import Alarm, ConfigError, Guard, PetalWarning
from petal.engine import Policy

from .scripted import CLASSES, Scripted, batch, collapse, drive, drive_to_alarm, make


def test_a_collapse_is_seen_and_taken_back() -> None:
    guard = make()
    drive(guard, 20)
    assert guard.alarms == []
    good = {k: p.detach().clone() for k, p in guard.adapted.items()}
    collapse(guard)
    with pytest.warns(PetalWarning, match=r"Scripted shows signs of a collapse after batch [23]\d: .*rollback"):
        drive(guard, 12, first=20)
    (alarm,) = guard.alarms
    assert alarm.step <= 32  # six looks
    assert (alarm.signal, alarm.action) == ("disagreement", "rollback")
    assert alarm.value > alarm.limit
    assert all(torch.equal(p, good[k]) for k, p in guard.adapted.items())
    assert guard.frozen
    while guard.batches < alarm.step + 6:                    # 240 samples
        assert guard.frozen
        drive(guard, 1, first=guard.batches)
    assert not guard.frozen


def test_labels_in_runs_are_no_collapse() -> None:
    guard = make()
    for seed in range(60):
        guard(batch(seed, torch.full((40,), seed // 15), sure=8.0))
    assert guard.alarms == []
    assert guard.status()["concentration"] > 0.5  # though nearly all it said was one class


def test_one_class_that_both_are_bad_at_is_no_collapse() -> None:
    """Labels in runs, so long that a look sees one class; of one in five classes student and source say different things."""
    guard = make()
    with torch.no_grad():
        guard.adapted["weight"].copy_(torch.eye(CLASSES))
        guard.adapted["weight"][0, 0], guard.adapted["weight"][1, 0] = 0.0, 1.0     # the student says 1 of the source's 0
    for seed in range(100):
        guard(batch(seed, torch.full((40,), seed // 4 % CLASSES), sure=8.0))
    assert guard.alarms == []
    assert 0.1 < guard.status()["disagreement"] < 0.4


@pytest.mark.parametrize("lost", ["narrow", "unsure"])
def test_a_lost_source_is_no_judge(lost: str) -> None:
    """The adapter knows better: it reads from what the source sees one class in, or nothing at all."""
    guard = make()
    with torch.no_grad():
        if lost == "narrow":
            guard.adapted["bias"][0] = -30.0
        else:
            guard.adapted["weight"].copy_(400.0 * torch.eye(CLASSES).roll(1, 0))
    differ = []
    for seed in range(40):
        x = batch(seed, sure=0.0)
        largest = x.argmax(1)
        if lost == "narrow":
            x[:, 0] += 30.0                                 # the source sees class 0 alone
            differ.append((largest != 0).double().mean())
        else:
            x *= 0.01                                       # the source sees nothing; the adapter says the next class
            differ.append(torch.tensor(1.0))
        guard(x)
    looked = torch.stack(differ[1::2]).double()             # every second batch, and older looks count less
    weight = 0.9 ** torch.arange(len(looked)).flip(0).double()
    assert guard.status()["disagreement"] == pytest.approx(float((looked * weight).sum() / weight.sum()), rel=1e-6)
    assert guard.status()["disagreement"] > 0.7
    assert guard.alarms == []


def test_both_judges_agree_that_it_is_lost_only_if_the_source_is_well() -> None:
    """The same disagreement as above, with a source that is sure and sees all classes, is an alarm."""
    guard = make("warn")
    drive(guard, 4)
    with torch.no_grad():
        guard.adapted["weight"].copy_(torch.eye(CLASSES).roll(1, 0))
    with pytest.warns(PetalWarning):
        drive(guard, 16, first=4)
    assert guard.alarms[0].signal == "disagreement"


def test_uniform_answers_are_seen() -> None:
    guard = make("warn", concentration=1.0)
    drive(guard, 4)
    with torch.no_grad():
        guard.adapted["weight"].mul_(0.01)
    with pytest.warns(PetalWarning):
        drive(guard, 80, first=4)
    assert guard.alarms[0].signal == "confidence"


@pytest.mark.parametrize("policy", ["rollback", "soften"])
def test_weights_that_are_not_finite_are_taken_back(policy: str) -> None:
    guard = make(policy)
    drive(guard, 12)
    with torch.no_grad():
        guard.adapted["weight"][0, 0] = math.nan
    with pytest.warns(PetalWarning):
        drive(guard, 2, first=12)
    assert torch.equal(guard.adapted["weight"].detach(), torch.eye(CLASSES))
    assert guard.alarms[0].action == "rollback"
    drive(guard, 20, first=14)
    assert len(guard.alarms) == 1


def test_policies_do_what_they_say() -> None:
    def after(policy: str, **options: object) -> Guard:
        guard = make(policy, **options)
        drive(guard, 12)
        collapse(guard)
        with pytest.warns(PetalWarning, match=policy):
            drive_to_alarm(guard)
        return guard

    kept = after("warn")
    assert kept.adapted["bias"][0].item() == 8.0
    assert not kept.frozen
    soft = after("soften", soften=0.25)
    assert torch.allclose(soft.adapted["weight"].detach(), 0.25 * torch.eye(CLASSES))
    assert soft.adapted["bias"][0].item() == pytest.approx(6.0)
    assert not soft.frozen
    with pytest.warns(PetalWarning):
        drive_to_alarm(soft)
    assert soft.adapted["bias"][0].item() == pytest.approx(6.0 * 0.75**2)  # the second time further
    reset = after("reset")
    assert torch.equal(reset.adapted["weight"].detach(), torch.eye(CLASSES))
    assert reset.frozen
    assert [a.action for a in reset.alarms] == ["reset"]
    frozen = after("freeze")
    assert torch.equal(frozen.adapted["weight"].detach(), torch.eye(CLASSES))
    drive(frozen, 100, first=100)
    assert frozen.frozen
    frozen.thaw()
    assert not frozen.frozen


def test_the_cool_down_doubles_while_the_cause_is_there() -> None:
    guard = make(every=1, cooldown=160)
    drive(guard, 30)
    lengths = []
    for _ in range(4):
        collapse(guard)
        with pytest.warns(PetalWarning):
            drive_to_alarm(guard)
        start = guard.batches
        while guard.frozen:
            drive(guard, 1, first=guard.batches)
        lengths.append(guard.batches - start)
    assert lengths == [4, 8, 16, 32]


def cool_down(guard: Guard) -> int:
    """Samples for which learning stays off, by the state."""
    seen, thaw = guard.state_dict()["guard.counters"][[1, 4]].tolist()
    return thaw - seen


def test_the_cool_down_doubles_up_to_256_times() -> None:
    guard = make(every=1, cooldown=160)
    drive(guard, 10)
    lengths = []
    for _ in range(11):
        collapse(guard)
        with pytest.warns(PetalWarning):
            drive_to_alarm(guard)
        lengths.append(cool_down(guard))
        guard.thaw()                                            # by hand: the next alarm comes soon
    assert lengths == [160 * 2**k for k in (0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8)]


@pytest.mark.parametrize(("quiet", "again"), [(90, 80), (110, 40)], ids=["soon", "late"])
def test_an_alarm_is_forgotten_after_100_cool_downs(quiet: int, again: int) -> None:
    guard = make(every=1, cooldown=40)                          # a cool-down is one batch long
    drive(guard, 10)
    collapse(guard)
    with pytest.warns(PetalWarning):
        drive_to_alarm(guard)
    assert cool_down(guard) == 40
    drive(guard, quiet, first=guard.batches)
    assert len(guard.alarms) == 1
    collapse(guard)
    with pytest.warns(PetalWarning):
        drive_to_alarm(guard)
    assert cool_down(guard) == again


def test_a_snapshot_is_promoted_only_if_every_look_after_it_was_healthy() -> None:
    guard = make(every=1, distance=1e6, update=1e6)
    weight = guard.adapted["weight"]

    def set_to(value: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(value)

    drive(guard, 1)                                             # the first good snapshot: the start
    set_to(1.1 * torch.eye(CLASSES))
    drive(guard, 10, first=1)                                   # a candidate, after 400 samples
    set_to(torch.eye(CLASSES)[[1, 0, 2, 3, 4]])                 # two of five classes swapped: suspicious, no alarm
    while guard.status()["disagreement"] < 0.25:
        drive(guard, 1, first=guard.batches)
    set_to(1.2 * torch.eye(CLASSES))
    while guard.status()["disagreement"] > 0.15:
        drive(guard, 1, first=guard.batches)                    # healthy again: another candidate
    assert guard.alarms == []
    snapshots = guard.state_dict()
    assert torch.equal(snapshots["guard.good.model.weight"], torch.eye(CLASSES))
    assert torch.equal(snapshots["guard.candidate.model.weight"], 1.2 * torch.eye(CLASSES))
    drive(guard, 11, first=guard.batches)                       # a window in which all is well
    set_to(torch.zeros(CLASSES, CLASSES))
    guard.rollback()
    assert torch.equal(weight.detach(), 1.2 * torch.eye(CLASSES))


def test_it_looks_after_every_due_batch_and_judges_from_the_eighth_look_on() -> None:
    guard = make("warn", every=3)
    collapse(guard)
    for seed in range(23):
        drive(guard, 1, first=seed)
        assert guard.looked == (guard.batches % 3 == 0)
    with pytest.warns(PetalWarning):
        drive(guard, 1, first=23)
    assert guard.looked
    assert [alarm.step for alarm in guard.alarms] == [24]


def test_learning_is_off_while_frozen_and_by_hand() -> None:
    guard = make()
    guard.method.drift = torch.full((CLASSES, CLASSES), 1e-4)
    drive(guard, 5)
    guard.freeze()
    before = guard.adapted["weight"].detach().clone()
    x = batch(99)
    assert torch.equal(guard(x), guard.predict(x))
    assert torch.equal(guard.adapted["weight"].detach(), before)
    guard.thaw()
    guard(x)
    assert not torch.equal(guard.adapted["weight"].detach(), before)
    guard.rollback()
    assert not torch.equal(guard.adapted["weight"].detach(), before)
    drive(guard, 30, first=100)
    assert guard.alarms == []


def test_a_batch_that_is_not_learned_from_restores_nothing() -> None:
    guard = Guard(petal.CoTTA(network(), views=0, restore=petal.Stochastic(1.0)))
    guard(images())
    assert float(guard.restored) == 1.0
    guard.freeze()
    guard(images())
    assert float(guard.restored) == 0.0


def flatten(guard: Guard, share: float) -> None:
    """Answers a little less sure than the source's, for good."""
    with torch.no_grad():
        guard.adapted["weight"].mul_(share)


def test_drift_is_drawn_back_to_its_limit_without_an_alarm() -> None:
    guard = make()
    drive(guard, 20)
    assert guard.pulls == 0
    assert torch.equal(guard.adapted["weight"], torch.eye(CLASSES))         # while nothing is wrong nothing is changed
    flatten(guard, 0.6)
    guard.optimizer.state[guard.adapted["bias"]] = {"momentum_buffer": torch.ones(CLASSES)}
    while guard.pulls == 0:
        drive(guard, 2, first=guard.batches)
    assert guard.adapted["weight"][0, 0].item() == pytest.approx(0.6 + 0.05 * 0.4, rel=1e-6)
    assert guard.optimizer.state[guard.adapted["bias"]]                     # the optimizer goes on
    drive(guard, 200, first=guard.batches)
    assert guard.status()["drift"] < 0.03
    after = guard.pulls
    drive(guard, 40, first=guard.batches)
    assert guard.pulls == after > 1                                         # held, and left alone from there on
    assert guard.adapted["weight"][0, 0].item() < 0.99
    assert guard.alarms == []


@pytest.mark.parametrize(
    "options", [{"drift": 1.0}, {"policy": "warn"}, {"pull": 0.0}, {"drift": 0.3}], ids=["off", "warn", "still", "higher"]
)
def test_drift_that_is_not_to_be_drawn_back_stays(options: dict[str, object]) -> None:
    guard = make(**options)  # type: ignore[arg-type]
    flatten(guard, 0.7)
    drive(guard, 60)
    assert 0.2 < guard.status()["drift"] < 0.3
    assert guard.adapted["weight"][0, 0].item() == pytest.approx(0.7)


def test_a_larger_pull_is_faster() -> None:
    def looks(pull: float) -> int:
        guard = make(pull=pull)
        flatten(guard, 0.6)
        drive(guard, 100)
        return guard.pulls

    assert 0 < looks(0.3) < looks(0.1)


def test_drift_is_of_predictions_without_views() -> None:
    """The average over views is flatter than one prediction with the same weights; that is no wear."""
    model = network()
    adapter = petal.Petal(model, petal.DiagonalGaussian.isotropic(model, std=0.1), lr=0.0, prior_weight=0.0, restore=None,
                          confidence=1.1, gate="batch", views=4, augment=lambda x: torch.randn_like(x))  # fmt: skip
    guard = Guard(adapter, every=1)
    guard(images(seed=0))
    assert guard.views_used
    assert guard.status()["drift"] == pytest.approx(0.0, abs=1e-7)
    with torch.no_grad():
        list(guard.teacher.parameters())[-2].mul_(0.1)                      # the last layer: flatter, in the teacher alone
    guard(images(seed=0))
    assert guard.status()["drift"] > 0.01


def test_a_pull_reaches_what_an_engine_keeps() -> None:
    model = network()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(100.0)                            # a source that is sure of itself is a judge
    q = petal.DiagonalGaussian.isotropic(model, std=0.1)
    adapter = petal.Petal(model, q, views=1, confidence=2.0, augment=lambda x: x, restore=None)
    guard = petal.accelerate(Guard(adapter, every=1, pull=0.5, drift=0.0), policy=Policy(low=torch.bfloat16))
    start = guard.origin()
    weights = {k: v.clone() for k, v in guard.weights().items()}
    for key, value in weights.items():
        if key.endswith(list(start)[-2]):
            value.mul_(0.02)                                                # the last layer: flatter
    guard.load_weights(weights)
    seeds = iter(range(20))
    before = {k: v.clone() for k, v in guard.teacher.state_dict().items()}
    while guard.pulls == 0:
        before = {k: v.clone() for k, v in guard.teacher.state_dict().items()}
        guard(images(seed=next(seeds)))
    assert int(guard.optimizer.state_dict()["state"][0]["step"]) == guard.batches  # it was not made anew
    for name, parameter in guard.teacher.named_parameters():
        assert torch.allclose(parameter, (before[name] + start[name]) / 2, rtol=1e-3, atol=2e-3)  # but for a step
    teacher = adapter.executor.member(guard.teacher)
    assert not torch.equal(teacher.low_flat, teacher.flat.bfloat16())
    teacher.in_low_precision(torch.bfloat16, adapted=True)              # as before the next batch
    assert torch.equal(teacher.low_flat, teacher.flat.bfloat16())


def test_a_runaway_is_seen_before_it_shows() -> None:
    """Steps fifty times as long: weights give it away while the answers are still right."""
    guard = make("warn", distance=3.0, update=10.0)
    guard.method.drift = torch.full((CLASSES, CLASSES), 1e-5)
    drive(guard, 40)
    assert guard.alarms == []
    guard.method.drift *= 50
    with pytest.warns(PetalWarning, match="update"):
        drive(guard, 10, first=40)
    assert guard.alarms[0].signal == "update"
    assert guard.status()["disagreement"] == 0.0


def test_state_continues_through_an_alarm_bit_by_bit(tmp_path: Path) -> None:
    def guarded() -> Guard:
        guard = make()
        guard.method.drift = torch.zeros(CLASSES, CLASSES)
        guard.method.drift[0] = 0.15  # everything becomes class 0, again and again
        return guard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PetalWarning)
        whole = guarded()
        answers = [whole(batch(s)) for s in range(60)]
        assert len(whole.alarms) > 1
        for cut in (1, 7, 12, whole.alarms[0].step, whole.alarms[0].step + 1):
            first = guarded()
            drive(first, cut)
            petal.save(first, tmp_path / "g.safetensors")
            second = guarded()
            petal.load(second, tmp_path / "g.safetensors")
            assert all(torch.equal(second(batch(s)), answers[s]) for s in range(cut, 60))
            assert second.alarms == whole.alarms
            assert all(torch.equal(v, second.state_dict()[k]) for k, v in whole.state_dict().items())
    assert isinstance(whole.alarms[0], Alarm)
    with pytest.raises(petal.checkpoint.CheckpointError, match=r"checkpoint of Guard\(Scripted\), and this adapter"):
        petal.load(Guard(petal.PseudoLabel(network())), tmp_path / "g.safetensors")


def test_every_counter_of_a_state_goes_on() -> None:
    guard, other = make(), make()
    drive(guard, 12)
    state = guard.state_dict()
    for well in (0, 1):
        state["guard.counters"] = torch.tensor([13, 521, 480, well, 700, 3, 440, 9, 5])
        other.load_state_dict(state)
        found = other.state_dict()
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(found[key], value), key
    assert (other.batches, other.pulls, other.frozen) == (13, 5, True)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    guard = make()
    drive(guard, 12)
    before = guard.state_dict()
    wrong = {"guard.counters": None, "guard.good.model.weight": torch.zeros(2), "guard.more": torch.zeros(1),
             "guard.pairs": torch.zeros(3)}  # fmt: skip
    for key, value in wrong.items():
        state = dict(before)
        if value is None:
            del state[key]
        else:
            state[key] = value
        with pytest.raises(ConfigError, match=key):
            guard.load_state_dict(state)
        assert all(torch.equal(v, before[k]) for k, v in guard.state_dict().items())


def test_methods_that_do_not_adapt_have_nothing_to_watch() -> None:
    guard = Guard(petal.BatchNorm(network()), every=1)
    for seed in range(5):
        guard(images(seed=seed))
    assert guard.alarms == []
    assert all(math.isnan(value) for value in guard.status().values())


def test_the_inner_adapter_shows_through() -> None:
    guard = Guard(petal.CoTTA(network(), views=0))
    assert guard.teacher is guard.adapter.teacher
    assert guard.model is guard.adapter.model
    assert guard.kind == "Guard(CoTTA)"
    assert petal.accelerate(guard) is guard
    assert guard.adapter.executor is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = guard.nothing


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "panic"}, "policy must be one of 'warn'"),
        ({"every": 0}, "every must be a whole number"),
        ({"window": 1.5}, "window must be a whole number"),
        ({"disagreement": 2.0}, "disagreement must be a number"),
        ({"distance": 0.5}, "distance must be"),
        ({"soften": -1.0}, "soften must be"),
        ({"cooldown": 0}, "cooldown must be"),
        ({"drift": -0.1}, "drift must be"),
        ({"pull": 1.5}, "pull must be"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Guard(Scripted(), **options)  # type: ignore[arg-type]


def test_it_goes_around_adapters_only() -> None:
    with pytest.raises(ConfigError, match="goes around a method"):
        Guard(network())  # type: ignore[arg-type]


@pytest.mark.parametrize(("attack", "share", "alarm"), [("none", 0.2, False), ("white", 0.2, True), ("stripes", 0.2, True),
                                                        ("dia-free", 0.3, True)])  # fmt: skip
def test_strangers_in_a_batch_are_seen_and_nothing_is_changed(attack: str, share: float, alarm: bool) -> None:
    guard = Guard(petal.Tent(network()), every=1, strangers=0.17)
    twin = petal.Tent(network())
    clean = [(images(40, seed=seed), torch.zeros(40, dtype=torch.long)) for seed in range(3)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in petal.attacks.Poisoned(clean, petal.attacks.ATTACKS[attack](), share, guard):
            assert torch.equal(guard(batch.x), twin(batch.x))
    found = [(a.step, a.signal, a.action) for a in guard.alarms]
    assert found == ([(1, "strangers", "warn")] if alarm else [])           # and not again while they stay
    assert ("strangers" in " ".join(str(w.message) for w in told)) is alarm
    assert (guard.status()["strangers"] > 0.17) is alarm
    other = Guard(petal.Tent(network()), every=1, strangers=0.17)
    other.load_state_dict(guard.state_dict())
    assert other.status() == guard.status()
    assert other.alarms == guard.alarms


def test_few_images_say_nothing_of_strangers() -> None:
    guard = Guard(petal.Tent(network()), every=1)
    x = images(31)
    x[:6] = 1.0
    guard(x)
    assert guard.status()["strangers"] == 0.0


def test_strangers_against_numpy() -> None:
    guard = Guard(petal.Tent(network()), every=1)
    x = images(40)
    x[:8] = 1.0
    model, seen = petal.BatchNorm(network()).model, []
    for layer in (model.norm1, model.norm2):
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].double().numpy()))
    with torch.no_grad():
        model(x)
    levels = []
    for values in seen:
        v = np.concatenate([values.mean((2, 3)), np.log(values.var((2, 3)) + 1e-6)], 1)
        center = np.median(v, 0)
        away = (v.mean(0) - center) / (1.4826 * np.median(np.abs(v - center), 0) + 1e-9)
        levels.append(np.sqrt(np.minimum(away**2, 4).mean()))
    guard(x)
    assert guard.status()["strangers"] == pytest.approx(min(levels), rel=1e-6)
