"""Bodies whose parts do not add up are refused, not read as far as they make sense."""

import numpy as np
import orjson
import pytest

from petal.serve.inputs import Refused, read_request

X = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
BINARY = {"name": "input", "shape": list(X.shape), "datatype": "FP32", "parameters": {"binary_data_size": X.nbytes}}
JSON = {"name": "input", "shape": list(X.shape), "datatype": "FP32", "data": X.reshape(-1).tolist()}


@pytest.mark.parametrize("inputs", [[BINARY], [BINARY, BINARY], [JSON], [JSON, BINARY], [BINARY, JSON], []])
@pytest.mark.parametrize("more", [b"", b"\0", b"some bytes that nobody told of", X.tobytes()])
def test_bytes_after_the_last_tensor_are_refused(inputs: list[dict[str, object]], more: bytes) -> None:
    head = orjson.dumps({"inputs": inputs})
    body = head + X.tobytes() * sum("data" not in entry for entry in inputs) + more
    if not more:
        assert len(read_request(body, str(len(head)), "m", None).inputs) == len(inputs)
        return
    with pytest.raises(Refused, match=f"^{len(more)} bytes follow the tensors") as refusal:
        read_request(body, str(len(head)), "m", None)
    assert refusal.value.status == 400
