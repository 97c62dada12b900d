"""A look at the sample whose token probabilities differ most between generation and training.

Shapes: B rows, T tokens. Index t of a log-probability is that of token t. A token counts where `token_mask` and the
row's `sample_mask` are not 0 and t lies in the response, from `prompt_lengths` up to `full_lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lucidrl.errors import ConfigError, DataError
from lucidrl.utils.imports import require_package

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TOKEN_COLUMNS = ("generation_logprobs", "prev_logprobs", "token_mask")
_ROW_COLUMNS = ("sample_mask", "prompt_lengths", "full_lengths")


@dataclass(frozen=True)
class WorstSample:
    """The sample of a batch with the largest error, and its N valid tokens with finite log-probabilities."""

    index: int
    """Its row in the batch."""
    log_error: float
    """Logarithm of its error, which is the mean over tokens of exp(|difference|) and may be beyond any float."""
    positions_N: np.ndarray
    """Where the tokens stand in the response, counted from 0."""
    generation_N: np.ndarray
    """Log-probabilities in generation."""
    training_N: np.ndarray
    """Log-probabilities in training, `prev_logprobs`."""
    num_skipped: int
    """Valid tokens of the whole batch that are left out, because a log-probability is not finite."""

    @property
    def difference(self) -> np.ndarray:
        """[N] generation minus training, in log-probability."""
        return self.generation_N - self.training_N

    @property
    def largest_absolute(self) -> int:
        """The token (as index into N) whose two probabilities are furthest apart."""
        return int(abs(_probabilities(self.generation_N) - _probabilities(self.training_N)).argmax())

    @property
    def largest_relative(self) -> int:
        """The token (as index into N) whose two probabilities have the largest ratio."""
        return int(abs(self.difference).argmax())


def token_error_figure(data: Mapping[str, Any]) -> tuple[Figure | None, str]:
    """The worst sample as a figure; or None and the reason why there is nothing to plot. Never raises for bad data."""
    try:
        require_package("matplotlib", "a plot of token errors", extra="plots")
        return _drawn(worst_sample(data)), ""
    except (ConfigError, DataError) as error:
        return None, str(error)


def worst_sample(data: Mapping[str, Any]) -> WorstSample:
    """Find the sample with the largest error; the first one of several.

    Raises:
        DataError: a column is missing or of another shape, or no valid token has finite log-probabilities.
    """
    import numpy as np

    columns = _columns(data)
    generation_BT, training_BT, token_mask_BT = (columns[name] for name in _TOKEN_COLUMNS)
    sample_mask_B, starts_B, ends_B = (columns[name] for name in _ROW_COLUMNS)
    starts_B = np.maximum(starts_B, 0)
    position_T = np.arange(token_mask_BT.shape[1])
    in_response_BT = (position_T >= starts_B[:, None]) & (position_T < ends_B[:, None])
    valid_BT = (token_mask_BT != 0) & (sample_mask_B != 0)[:, None] & in_response_BT
    with np.errstate(invalid="ignore", over="ignore"):
        difference_BT = generation_BT - training_BT
    num_skipped = int((valid_BT & ~np.isfinite(difference_BT)).sum())
    valid_BT &= np.isfinite(difference_BT)
    if not valid_BT.any():
        raise DataError(
            f"all {num_skipped} valid tokens have log-probabilities that are not finite"
            if num_skipped
            else "no token of a response is valid by token_mask and sample_mask"
        )
    log_error_B = _log_mean_exp(abs(difference_BT), valid_BT)
    row = int(log_error_B.argmax())
    tokens = valid_BT[row].nonzero()[0]
    return WorstSample(
        index=row,
        log_error=float(log_error_B[row]),
        positions_N=tokens - int(starts_B[row]),
        generation_N=generation_BT[row, tokens],
        training_N=training_BT[row, tokens],
        num_skipped=num_skipped,
    )


def _columns(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Every column as float64, its shape checked."""
    import numpy as np

    columns: dict[str, np.ndarray] = {}
    for name in (*_TOKEN_COLUMNS, *_ROW_COLUMNS):
        if data.get(name) is None:
            raise DataError(f"the data has no column {name!r}")
        column = data[name]
        # By way of torch's own float64, since numpy does not know bfloat16.
        plain = column.detach().cpu().double() if hasattr(column, "detach") else column
        try:
            columns[name] = np.asarray(plain, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"column {name!r} is no array of numbers: {error}") from error
    shape = columns["token_mask"].shape
    if len(shape) != 2:
        raise DataError(f"column 'token_mask' has shape {shape}; it must have rows and tokens")
    for name, column in columns.items():
        needed = shape if name in _TOKEN_COLUMNS else shape[:1]
        if column.shape != needed:
            raise DataError(
                f"column {name!r} has shape {column.shape}, but token_mask of shape {shape} asks for {needed}"
            )
    return columns


def _log_mean_exp(values_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """[B] log of the masked mean of exp(values), without overflow; -inf for a row without valid tokens."""
    import numpy as np

    values_BT = np.where(mask_BT, values_BT, -np.inf)
    largest_B = np.where(mask_BT.any(axis=1), values_BT.max(axis=1), 0)
    total_B = np.exp(values_BT - largest_B[:, None]).sum(axis=1)
    with np.errstate(divide="ignore"):
        return largest_B + np.log(total_B) - np.log(np.maximum(mask_BT.sum(axis=1), 1))


def _probabilities(logprobs: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.exp(np.minimum(logprobs, 0))  # rounding, or a wrong input, may be above 0


def _drawn(worst: WorstSample) -> Figure:
    # Figures made by themselves need no display and no global state, as those of pyplot do.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    title = f"sample {worst.index}: error {_factor(worst.log_error)} over {len(worst.positions_N)} tokens"
    if worst.num_skipped:
        title += f"; tokens of the batch left out as not finite: {worst.num_skipped}"
    figure.suptitle(title)
    generation_N, training_N = _probabilities(worst.generation_N), _probabilities(worst.training_N)
    absolute, relative = worst.largest_absolute, worst.largest_relative
    _plot_curve(upper, worst.positions_N, generation_N, "generation")
    _plot_curve(upper, worst.positions_N, training_N, "training (prev_logprobs)")
    absolute_error = f"{abs(generation_N[absolute] - training_N[absolute]):.4g}"
    _mark(upper, worst.positions_N[absolute], generation_N[absolute], f"largest absolute error {absolute_error}")
    upper.set_ylabel("probability")
    _plot_curve(lower, worst.positions_N, worst.difference, "generation - training")
    relative_error = _factor(abs(worst.difference[relative]))
    _mark(lower, worst.positions_N[relative], worst.difference[relative], f"largest relative error {relative_error}")
    lower.axhline(0, color="gray", linewidth=0.5)
    lower.set_ylabel("difference of log-probabilities")
    lower.set_xlabel("position in the response, in tokens")
    for axes in (upper, lower):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)  # above, not over the curves
    return figure


def _plot_curve(axes: Axes, positions_N: np.ndarray, values_N: np.ndarray, label: str) -> None:
    """A line with gaps where tokens in between do not count."""
    import numpy as np

    curve = np.full(positions_N[-1] + 1, np.nan)
    curve[positions_N] = values_N
    axes.plot(curve, marker=".", markersize=3, linewidth=1, label=label)


def _mark(axes: Axes, position: int, value: float, label: str) -> None:
    axes.plot(position, value, "o", color="tab:red", fillstyle="none", label=f"{label} at token {position}")


def _factor(log_ratio: float) -> str:
    return f"x{math.exp(log_ratio):.4g}" if log_ratio < 700 else f"xe^{log_ratio:.4g}"
