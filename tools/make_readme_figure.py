"""The README's figure: error and calibration of each domain along the stream, from a run. Writes docs/images/stream.png.

    petal run digits -m source -m tent -m petal -m petal-f+small+guard --seed 0-2 --out runs/readme
    python tools/make_readme_figure.py runs/readme
"""

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

from petal import report
from petal.report.drawing import STYLE, new_figure
from petal.report.tables import short

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "stream.png"
LOOKS = {                    # row: name, colour (of Okabe and Ito), dashes, width
    "source": ("no adaptation", "#7A7A7A", (0, (1.2, 1.2)), 1.8),
    "tent": ("TENT", "#CC79A7", (0, (5, 1.5)), 1.8),
    "petal": ("PETAL", "#D55E00", "-", 1.8),
    "petal-f+small+guard": ("petal.adapt", "#0072B2", "-", 2.8),
}


def main(run: str) -> None:
    jobs = [job for job in report.read_run(run).jobs if job.row in LOOKS]
    with mpl.rc_context({**STYLE, "font.size": 10.5, "axes.axisbelow": True}):
        figure = new_figure(5.4, 9.0)
        above, below = figure.subplots(2, 1, sharex=True)
        panels = ((above, "error", "error (%)", 100, (2, 5, 10, 20, 50)),
                  (below, "ece", "calibration error", 1, (0.02, 0.1, 0.5)))  # fmt: skip
        for axes, metric, title, scale, ticks in panels:
            for row, (name, colour, dashes, width) in LOOKS.items():
                runs = [job.records for job in jobs if job.row == row]
                visits = runs[0].visits
                values = np.array([[getattr(records.scores(domain), metric) for domain, _, _ in visits] for records in runs])
                edges = [visits[0][1], *(end for _, _, end in visits)]
                style = {"color": colour, "linestyle": dashes, "linewidth": width, "label": name}
                axes.stairs(values.mean(0) * scale, edges, baseline=None, **style)
            for edge in edges:
                axes.axvline(edge, color="#dddddd", linewidth=0.6, zorder=0)
            axes.set_ylabel(f"{title}, log scale")
            axes.set_xlim(edges[0], edges[-1])
            axes.set_yscale("log")
            axes.set_yticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        for domain, start, end in visits:
            above.annotate(short(domain), ((start + end) / 2, 1), (-4, 4), xycoords=("data", "axes fraction"),
                           textcoords="offset points", rotation=40, annotation_clip=False)  # fmt: skip
        below.set_xlabel("batch of 50 images: labels are never seen, and nothing says when the domain changes")
        figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, handlelength=3)
        PICTURE.parent.mkdir(exist_ok=True)
        figure.savefig(PICTURE, dpi=150)
    for row, (name, *_) in LOOKS.items():
        scores = [job.records.scores() for job in jobs if job.row == row]
        error, ece = (np.mean([getattr(s, metric) for s in scores]) for metric in ("error", "ece"))
        print(f"{name:20} error {100 * error:.2f} %, ECE {ece:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
