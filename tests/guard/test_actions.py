import pytest
import torch

from petal.guard.actions import CoolDown, Snapshots

from .scripted import Scripted


@pytest.mark.parametrize(("seen", "strikes"), [(4200, 3), (4201, 0)])
def test_alarms_are_forgotten_after_more_than_100_cool_downs(seen: int, strikes: int) -> None:
    rest = CoolDown()
    rest.strikes, rest.last = 3, 200
    assert rest.strike(seen, 40) == strikes
    assert (rest.strikes, rest.last) == (strikes + 1, seen)


@pytest.mark.parametrize(("strikes", "times"), [(0, 1), (1, 2), (8, 256), (9, 256), (50, 256)])
def test_a_cool_down_is_at_most_256_times_the_first(strikes: int, times: int) -> None:
    rest = CoolDown()
    rest.start(1000, 40, strikes)
    assert rest.thaw == 1000 + 40 * times


def test_a_pull_moves_all_weights_by_its_share() -> None:
    adapter = Scripted()
    origin = adapter.origin()
    with torch.no_grad():
        adapter.adapted["weight"].add_(1.0)
        adapter.adapted["bias"].fill_(2.0)
    Snapshots(adapter).pull(origin, 0.25, fresh=True)
    torch.testing.assert_close(adapter.adapted["weight"].detach(), torch.eye(5) + 0.75)
    torch.testing.assert_close(adapter.adapted["bias"].detach(), torch.full((5,), 1.5))


def test_when_a_snapshot_is_taken_and_promoted() -> None:
    """Looks after so many samples, healthy or not, with a window of 100: whose weights are good and whose the candidate."""
    adapter = Scripted()
    snapshots = Snapshots(adapter)
    found = []
    looks = [(60, True), (100, True), (160, True), (200, True), (220, False), (240, True), (300, True), (340, True)]
    for seen, healthy in looks:
        with torch.no_grad():
            adapter.adapted["bias"].fill_(float(seen))
        snapshots.update(healthy, seen, 100)
        found.append(tuple(s and int(s["model.bias"][0]) for s in (snapshots.good, snapshots.candidate)))
    assert found == [(None, None), (None, 100), (None, 100), (100, 200), (100, 200), (100, 240), (100, 240), (240, 340)]
