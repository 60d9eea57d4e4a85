"""`petal corrupt`: a whole corrupted benchmark from clean images."""

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from petal import corruptions, data
from petal.cli.common import make_console
from petal.cli.options import Quiet
from petal.errors import ConfigError, DataError


def corrupt(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="Clean images: class folders, CIFAR's Python batches, an .npz with images and labels, or 'digits'.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write to: new, empty, or of an earlier run.")],
    layout: Annotated[
        Literal["auto", "npy", "folders"],
        typer.Option(help="npy: CIFAR-10-C's. folders: ImageNet-C's. auto: folders if IN is class folders, else npy."),
    ] = "auto",
    corruption: Annotated[
        list[str] | None, typer.Option(help="A corruption to make; may be repeated. Default: the 15 of the benchmark.")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Make the four validation corruptions instead of the 15.")
    ] = False,
    severity: Annotated[
        list[int] | None, typer.Option(min=1, max=5, help="A severity to make; may be repeated. Default: all five.")
    ] = None,
    profile: Annotated[
        Literal["auto", "cifar", "imagenet"],
        typer.Option(help="Whose constants. auto: cifar for sides up to 96 pixels, imagenet for larger ones."),
    ] = "auto",
    size: Annotated[
        int | None,
        typer.Option(min=8, help="Bring images of class folders to this size: resize to 8/7 of it, cut out the centre."),
    ] = None,
    image_format: Annotated[
        Literal["png", "jpg"],
        typer.Option("--format", help="Of files in folders. png is exact; jpg (quality 85) is what ImageNet-C has."),
    ] = "png",
    seed: Annotated[int, typer.Option(min=0, help="Seed; a stream with the same seed has the same images.")] = 0,
    images: Annotated[int | None, typer.Option(min=1, help="Take the first so many images only.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images worked on at a time.")] = 200,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make anew what is finished already.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a corrupted dataset (CIFAR-10-C's or ImageNet-C's layout) from the clean images IN to the folder OUT.

    If it is interrupted, repeat the command: finished files stay, the rest is made.
    """
    clean = data.open_dataset(source) if size is None else data.open_dataset(source, kind="image-folder", size=size)
    where = Path(source).resolve()
    if where.is_dir() and (out.resolve() == where or where in out.resolve().parents):
        raise DataError(f"{out}: lies in {source}, whose images it would be counted among; choose a folder outside")
    names = (*(corruption or ()), *(corruptions.VALIDATION_CORRUPTIONS if validation else ()))
    console = make_console(quiet=quiet, highlight=False)
    columns = (TextColumn("{task.description:18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        task = bar.add_task("looking", total=None)
        written = data.write_corrupted(
            clean,
            out,
            layout=layout,
            names=names or corruptions.CORRUPTIONS,
            severities=severity or range(1, 6),
            profile=profile,
            seed=seed,
            images=images,
            batch_size=batch_size,
            device=_device(device),
            image_format=image_format,
            overwrite=overwrite,
            progress=lambda now: bar.update(task, description=now.corruption, completed=now.done, total=now.total),
        )
    what = {"npy": "file", "folders": "folder"}[written.layout] + ("" if len(written.made) == 1 else "s")
    kept = f"; {len(written.kept)} were finished already" if written.kept else ""
    console.print(f"{out}: wrote {len(written.made)} {what} of {written.images} images a severity, {written.profile}"
                  f" profile, seed {seed}{kept}", soft_wrap=True)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
