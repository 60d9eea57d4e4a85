"""Experiments and the jobs that run them: a folder with a manifest, records, samples and checkpoints.

    >>> import tempfile, torch
    >>> from petal.data import digits
    >>> experiment = Experiment("digits", severity=3, images=8, batch_size=4)
    >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    >>> opened = OpenExperiment(experiment, network, data=digits("test"))     # or experiment.open(device), from files
    >>> (row,) = experiment.rows(["source"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = run_job(Job(row, order=1, seed=0), folder, opened)
    >>> len(records), records[0]["domain"], records[0]["n"]
    (30, 'gaussian_noise', 4)
"""

from petal.runs.experiment import ORDER, WAYS, Experiment, OpenExperiment
from petal.runs.job import Job, JobProgress, jobs_for, run_job
from petal.runs.manifest import make_manifest, open_run, read_manifest
from petal.runs.protocols import PROTOCOLS, Protocol, protocol
from petal.runs.records import read_records, score
from petal.runs.tracking import Tracking
from petal.runs.tuning import ALPHAS, DELTAS, Trial, tune

__all__ = [
    "ALPHAS",
    "DELTAS",
    "ORDER",
    "PROTOCOLS",
    "WAYS",
    "Experiment",
    "Job",
    "JobProgress",
    "OpenExperiment",
    "Protocol",
    "Tracking",
    "Trial",
    "jobs_for",
    "make_manifest",
    "open_run",
    "protocol",
    "read_manifest",
    "read_records",
    "run_job",
    "score",
    "tune",
]
