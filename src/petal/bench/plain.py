"""The same network in a plain FastAPI handler, to compare `petal serve` with: no batches, no adaptation, no limits.

    python -m petal.bench.plain PORT NETWORK.safetensors
"""

import sys
from typing import Any

import numpy as np
import torch

from petal import models
from petal.recipes import recipe


def app(weights: str) -> Any:
    """One route: the bytes of float32 images in, labels and probabilities out."""
    from fastapi import FastAPI, Request

    chosen = recipe("digits")
    network = models.build(chosen.network, chosen.classes, weights, **chosen.network_options)
    out = FastAPI()

    @out.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        body = await request.body()
        x = torch.from_numpy(np.frombuffer(body, np.float32).reshape(-1, 3, 32, 32).copy())
        with torch.inference_mode():
            logits = network(x)
        return {"id": request.headers.get("x-id"), "label": logits.argmax(1).tolist(), "logits": logits.tolist()}

    return out


def main() -> None:
    """Serve until the process is ended."""
    import uvicorn

    torch.set_num_threads(1)
    uvicorn.run(app(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
