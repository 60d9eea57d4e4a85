"""Many runs: a grid of recipes, methods, orders, seeds and settings, as independent jobs on Ray or one after the other.

    SWEEP/sweep.json        format "petal-sweep-1": the recipes, what was set, and the command
    SWEEP/RECIPE/           a run's folder as `petal run` writes it; `petal report SWEEP` reads them all

A job that is lost or fails is begun again from its own checkpoint; one that is done is never begun again. Where several
machines take part, the folder is on a disk that all of them see.
"""

from petal.sweep.cluster import Resources, connected, on_ray, prepare_on_ray
from petal.sweep.grid import grid_rows, split_values
from petal.sweep.jobs import Outcome, Part, Ready, Task, in_turn, prepare, what_is_left, work, write_sweep
from petal.sweep.watch import JobWatch

__all__ = [
    "JobWatch",
    "Outcome",
    "Part",
    "Ready",
    "Resources",
    "Task",
    "connected",
    "grid_rows",
    "in_turn",
    "on_ray",
    "prepare",
    "prepare_on_ray",
    "split_values",
    "what_is_left",
    "work",
    "write_sweep",
]
