"""schemathesis over the REST surface, by the server's own OpenAPI document: no 5xx, no hang."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode

from serve.running import NAME, Running

LIMITS: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_no_request_breaks_the_server(server: Running, mode: GenerationMode) -> None:
    before = server.digest()
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.http}/openapi.json")
    statuses: set[int] = set()
    tried = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue                            # nothing of these can be invalid

        @seed(7)
        @settings(max_examples=25 if operation.method == "post" else 5, **LIMITS)
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal tried
            for name in (None, NAME):           # as generated, and for the model that is there
                if name is not None and "model_name" not in (case.path_parameters or {}):
                    continue
                if name is not None:
                    case.path_parameters = {**case.path_parameters, "model_name": name}
                    if "model_version" in case.path_parameters:
                        case.path_parameters["model_version"] = "source"
                response = case.call(timeout=30)
                tried += 1
                statuses.add(response.status_code)
                assert response.status_code < 500, (response.status_code, response.text)

        check()
    assert tried > 60
    assert 400 in statuses
    assert server.digest() == before, "nothing of this was worth adapting to"
    assert server.request("GET", "/v2/health/live")[0] == 200
