"""Requests are answered in the order of their arrival: nobody small gets past somebody large."""

from pathlib import Path

import pytest

from serve.parts import Echo, sample, settle, worker


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([6, 6, 3, 2], [[0], [1, 2], [3]]),                 # the third would fit into the first batch, the last into both
        ([9, 2, 1, 1, 8], [[0], [1, 2, 3], [4]]),
        ([4, 10, 4, 4, 4], [[0], [1], [2, 3], [4]]),        # a whole batch goes alone, in its turn
    ],
)
def test_a_batch_ends_where_the_next_request_does_not_fit(
    sizes: list[int], batches: list[list[int]], tmp_path: Path
) -> None:
    one = worker(tmp_path, Echo, batch_size=10, queue=100)
    futures = [one.submit(sample(0.6 + 0.01 * number, size)) for number, size in enumerate(sizes)]
    one.start()
    settle(futures)
    one.close()
    found = [list(dict.fromkeys(round((value - 0.6) * 100) for value in batch)) for batch in one.adapter.batches]
    assert found == batches
