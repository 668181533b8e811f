"""The learning curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

_SMOOTHED_STEPS = 10


def draw_curve(
    path: Path,
    *,
    title: str,
    training: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float, float]],
) -> None:
    """Draws accuracy over steps into a PNG file.

    Args:
        path: The file.
        title: Stands above.
        training: Step and share of correct training rollouts.
        held_out: Step, held-out accuracy and its standard error.
    """
    # It takes a second to import, and only this file needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        steps = [step for step, _ in training]
        axes.plot(steps, [accuracy for _, accuracy in training], color="#b8cbe0", linewidth=0.8)
        axes.plot(
            steps,
            _running_mean([accuracy for _, accuracy in training]),
            color="#2f6db3",
            linewidth=1.6,
            label=f"training rollouts, mean of {_SMOOTHED_STEPS} steps",
        )
    if held_out:
        axes.errorbar(
            [step for step, _, _ in held_out],
            [accuracy for _, accuracy, _ in held_out],
            yerr=[error for _, _, error in held_out],
            color="#c8511b",
            marker="o",
            capsize=3,
            label="held-out problems, greedy, with standard error",
        )
    axes.set(title=title, xlabel="optimizer step", ylabel="accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    if training or held_out:
        axes.legend(loc="lower right")
    figure.savefig(path)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, at most ten."""
    means = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - _SMOOTHED_STEPS) : end]
        means.append(sum(window) / len(window))
    return means
