"""`petal apply`: adapt over images without labels, and write what was predicted."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from petal.apply import Application, Applied, ApplyProgress
from petal.apply import apply as apply_to
from petal.cli.codes import PARTLY
from petal.cli.common import choose_device, make_console
from petal.cli.options import Device, Every, Quiet, bar, options_of, shown_warnings
from petal.cli.run import Countdown
from petal.errors import ConfigError
from petal.source_folder import CONFIG

SHOWN = 10      # images that could not be read, on the screen; all are in the files


@options_of(Application)
def apply(
    *,
    what: Annotated[
        list[str],
        typer.Argument(metavar="[NETWORK] INPUT", help="NETWORK: a name such as timm:resnet50, mine.nets:resnet, wrn-40-2, "
                       "or a source folder; none with --source. INPUT: a folder of images, an .npz, or a video."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .csv; a .json with the same name says how it was made.")],
    given: dict[str, Any],
    device: Device = "auto",
    checkpoint_every: Every = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many batches, with a checkpoint; the same command goes on.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Adapt a network to images without labels, and write a line for each: label, confidence, and what was done.

    If it is interrupted, repeat the command: it goes on where it stopped, and the file is the same. Exit code 1 says that
    some images could not be read; they are named.
    """
    if len(what) > 2 or (len(what) < 2 and given["source"] is None):
        raise ConfigError(f"give a network and an input, or --source FOLDER and an input; got {' '.join(what)}")
    network, path = (what[0] if len(what) == 2 else None), what[-1]
    if network is not None and given["source"] is None and (Path(network) / CONFIG).is_file():
        network, given["source"] = None, network
    console = make_console(quiet=quiet)
    settings = Application(network, **{**given, "set": tuple(given["set"] or ())})
    with shown_warnings(console):
        place = choose_device(device)
        opened = settings.open(path, place)
        with bar(console, quiet) as progress:
            task = progress.add_task(opened.method, total=-(-opened.pictures.count // settings.batch_size))

            def shown(p: ApplyProgress) -> None:
                text = f"{opened.method}: {p.did}, confidence {p.confidence:.2f}" if p.did else opened.method
                progress.update(task, completed=p.batch, total=max(p.batches, p.batch), description=escape(text))
                if p.resumed:
                    progress.console.print(f"goes on at batch {p.batch}", highlight=False)

            stop = Countdown(stop_after)
            found = apply_to(opened, out, checkpoint_every=checkpoint_every, progress=shown, stop=stop)
        for text in told(found):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    if found.done and found.unreadable:
        raise typer.Exit(PARTLY)


def told(found: Applied) -> list[str]:
    """What came of it, line by line."""
    counts = ", ".join(f"{count} {what}" for what, count in found.did.items())
    out = [f"{found.images} images: {counts}" + (" (was done)" if found.was_done else "")]
    shown = list(found.unreadable.items())[:SHOWN]
    out += [f"cannot be read: {name}: {why}" for name, why in shown]
    if len(found.unreadable) > SHOWN:
        out.append(f"and {len(found.unreadable) - SHOWN} more, in {found.out}")
    if found.left_out:
        names = ", ".join(found.left_out[:SHOWN]) + (", ..." if len(found.left_out) > SHOWN else "")
        out.append(f"left out, since they are no images: {len(found.left_out)} ({names})")
    if not found.done:
        return [*out, "stopped: the same command goes on"]
    return [*out, f"wrote {found.out} and {found.out.with_suffix('.json')}"]
