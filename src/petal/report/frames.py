"""The records of runs as one pandas frame, and as a Parquet file."""

from pathlib import Path
from typing import Any

from petal._files import replacing
from petal._optional import optional
from petal.errors import DataError
from petal.report.files import JobFolder, RunFolder
from petal.report.records import Records
from petal.report.scores import Report

_COLUMNS = tuple(name for name in Records.__dataclass_fields__ if name not in ("calibration", "views_used"))


def to_frame(report: Report) -> Any:
    """The records of every job, unfinished ones too, as a pandas frame: a row a batch, scores as fractions.

    `run` is the folder, `job` the job's; `row`, `method`, `label`, `order` and `seed` are what tables call it.
    """
    pd = optional("pandas", "a frame", "frames")
    parts = [_frame(pd, run, job) for run in report.folders for job in run.jobs if job.records is not None]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _frame(pd: Any, run: RunFolder, job: JobFolder) -> Any:
    records = job.records
    names = {"run": run.name, "job": job.id, "row": job.row, "method": job.method, "label": job.label,
             "order": job.order, "seed": job.seed, "finished": job.finished}  # fmt: skip
    columns = {name: getattr(records, name) for name in _COLUMNS} | {"views_used": records.views_used > 0}  # type: ignore[union-attr]
    return pd.DataFrame({**{name: [value] * job.batches for name, value in names.items()}, **columns})


def write_parquet(report: Report, path: str | Path) -> None:
    """Write that frame to a Parquet file, for pandas, Polars, DuckDB and R."""
    optional("pyarrow", "a Parquet file", "frames")
    frame = to_frame(report)
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            frame.to_parquet(temporary, engine="pyarrow", index=False)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}") from None
