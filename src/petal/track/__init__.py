"""Records into the tools that people watch: TensorBoard, Weights & Biases, MLflow.

    with petal.track.TensorBoard("logs", name="tent") as board:
        petal.evaluate(petal.Tent(model), stream, callbacks=[board])

A tracker is a callback (`petal.Callback`) with a place where its values go; `petal run --track tensorboard` makes one for
each job. Each needs its own package: `pip install 'petal-tta[track]'`.
"""

from petal.track.mlflow import MLflow
from petal.track.tensorboard import TensorBoard
from petal.track.tracker import Tracker
from petal.track.wandb import WandB

TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}

__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "WandB"]
