"""tritonclient[grpc] in a process of its own: its message types and KServe's cannot be in one.

    python grpc_client.py PORT FILE.npz < QUESTIONS.json > ANSWERS.json

A question is {"array": name in the file, "version", "parameters", "outputs", "id"}; its answer has the outputs, or an error.
"""

import json
import sys
from typing import Any


def main() -> None:
    import numpy as np
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(f"127.0.0.1:{sys.argv[1]}")
    arrays = np.load(sys.argv[2], allow_pickle=True)
    about = {
        "live": client.is_server_live(), "ready": client.is_server_ready(), "model": client.is_model_ready("digits"),
        "versions": list(client.get_model_metadata("digits").versions),
    }  # fmt: skip
    answers: list[dict[str, Any]] = []
    for question in json.load(sys.stdin):
        x = arrays[question["array"]]
        tensor = triton.InferInput("input", list(x.shape), "BYTES" if x.dtype == object else "FP32")
        tensor.set_data_from_numpy(x)
        wanted = [triton.InferRequestedOutput(name) for name in question.get("outputs", ())]
        try:
            result = client.infer(
                question.get("model", "digits"), [tensor], model_version=question.get("version", ""), outputs=wanted or None,
                request_id=question.get("id", ""), parameters=question.get("parameters"),
            )  # fmt: skip
        except triton.InferenceServerException as error:
            answers.append({"error": str(error)})
            continue
        response = result.get_response()
        outputs = {o.name: result.as_numpy(o.name).tolist() for o in response.outputs}
        adapted = response.parameters["adapted"].bool_param
        answers.append({"id": response.id, "version": response.model_version, "adapted": adapted, **outputs})
    json.dump({"about": about, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
