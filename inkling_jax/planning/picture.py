"""A plan as one picture: what fills a device, and how long its steps take."""

from pathlib import Path

from matplotlib.figure import Figure

from inkling_jax.errors import InputError
from inkling_jax.planning.report import Plan

SUFFIXES = (".png", ".svg", ".pdf")
GB, MS = 1e9, 1e-3


def check(file: Path) -> None:
    """Refuses, before anything is planned, a file that could not be written."""
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file}: a picture ends in {', '.join(SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise InputError(f"{file}: the directory is missing, make it first")


def draw(plan: Plan, file: Path) -> None:
    """Draws memory on the left and times on the right."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    memory, times = figure.subplots(1, 2, width_ratios=(2, 3))
    figure.suptitle(
        f"{plan.model} on {plan.mesh} ({plan.hardware}), {plan.context:,} tokens × {plan.batch}"
    )
    parts = {f"{w.part}, {w.format}": w.nbytes for w in plan.memory.weights if w.nbytes > GB / 10}
    parts["other weights"] = sum(w.nbytes for w in plan.memory.weights) - sum(parts.values())
    parts["keys and values"] = plan.memory.keys_values
    parts["convolution states"] = plan.memory.convolutions
    kind = "at least" if plan.memory.analytic else "by the compiler"
    parts[f"temporaries, {kind}"] = plan.memory.temporaries
    names = list(parts)[::-1]
    bars = memory.barh(names, [parts[name] / GB for name in names], color="tab:blue")
    memory.bar_label(bars, fmt="{:.1f}", padding=2)
    memory.margins(x=0.15)
    memory.set_xlabel("GB of one device")
    memory.set_title(f"{plan.memory.total / GB:.1f} of {plan.memory.capacity / GB:.0f} GB")

    rows = range(len(plan.steps))[::-1]
    times_of = {"byte floor": "byte_floor", "FLOP floor": "flop_floor", "expected": "expected"}
    for i, (label, field) in enumerate(times_of.items()):
        values = [getattr(step, field) / MS for step in plan.steps]
        drawn = times.barh([r + 0.27 * (1 - i) for r in rows], values, 0.27, label=label)
        times.bar_label(drawn, fmt="{:.3g}", padding=2, fontsize=7)
    times.set_yticks(list(rows), [step.work.name for step in plan.steps])
    times.set_xscale("log")
    times.margins(x=0.15)
    times.set_xlabel("ms of one step (a projection, nothing was run)")
    figure.legend(loc="outside lower right", ncols=3)
    figure.savefig(file, dpi=120)
