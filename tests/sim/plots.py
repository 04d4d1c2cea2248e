"""Drawings of what the tables say."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.sim.report import mean
from tests.sim.runs import Run

Sweep = Mapping[str, Mapping[float, Sequence[Run]]]  # by design, then scale
BEFORE_THE_PEAK = 2.0


def draw(folder: Path, sweep: Sweep, burst: Mapping[str, Run], trail: Sequence[tuple[float, ...]]) -> list[Path]:
    """Write SVGs into the folder and return them."""
    import matplotlib as mpl

    mpl.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    return [_sweep(folder, sweep), _burst(folder, burst), _caps(folder, trail)]


def _sweep(folder: Path, sweep: Sweep) -> Path:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    for design, scales in sweep.items():
        loads = sorted(scales)
        axes[0].plot(loads, [mean("value_goodput_s", scales[load]) for load in loads], marker="o", label=design)
        axes[1].plot(loads, [100 * mean("in_slo_priority", scales[load]) for load in loads], marker="o", label=design)
    axes[0].set(title="Value of whole answers in time", xlabel="load (1.5 is about full)", ylabel="weighted tokens/s")
    axes[1].set(title="Priority in its SLO", xlabel="load", ylabel="%", ylim=(0, 102))
    for axis in axes:
        axis.set_ylim(bottom=0)
        axis.legend()
    return _save(figure, folder / "sweep.svg")


def _burst(folder: Path, burst: Mapping[str, Run]) -> Path:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4))
    for design, run in burst.items():
        if run.load.burst:
            start, length, factor = run.load.burst
            axis.axvspan(start, start + length, color="0.9")
            axis.set_title(f"Priority in its SLO, a burst of {factor:g} x in grey")
        axis.plot([at for at, _ in run.bins], [100 * met for _, met in run.bins], label=design)
    axis.set(xlabel="s", ylabel="% of those that came in 10 s", ylim=(0, 102))
    axis.legend()
    return _save(figure, folder / "burst.svg")


def _caps(folder: Path, trail: Sequence[tuple[float, ...]]) -> Path:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 4))
    at = [point[0] for point in trail]
    for place, label in ((1, "cap, requests"), (4, "in flight"), (5, "waiting with us"), (7, "waiting in the engine")):
        axis.plot(at, [point[place] for point in trail], label=label)
    axis.set(title="The adaptive cap at the highest load", xlabel="s", ylabel="requests")
    axis.legend()
    return _save(figure, folder / "caps.svg")


def _save(figure: object, path: Path) -> Path:
    from matplotlib import pyplot as plt

    plt.tight_layout()
    figure.savefig(path)  # type: ignore[attr-defined] # its stubs hide what subplots returns
    plt.close("all")
    return path
