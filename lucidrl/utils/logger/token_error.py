"""A plot of the sample whose token probabilities differ most between generation and training.

Shapes: B rows, T tokens. A token is valid if `token_mask` and the row's `sample_mask` are not 0 and it is in the
response, from `prompt_lengths` to `full_lengths`.
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
    """Row in the batch."""
    log_error: float
    """Logarithm of the sample's error, the mean over tokens of exp(|difference|), which may overflow a float."""
    positions_N: np.ndarray
    """Positions of the tokens in the response, from 0."""
    generation_N: np.ndarray
    """Log-probabilities in generation."""
    training_N: np.ndarray
    """Log-probabilities in training, `prev_logprobs`."""
    num_skipped: int
    """Valid tokens of the whole batch with log-probabilities that are not finite."""

    @property
    def difference(self) -> np.ndarray:
        """[N] generation minus training, in log-probability."""
        return self.generation_N - self.training_N

    @property
    def largest_absolute(self) -> int:
        """Index into N of the token with the largest difference of probabilities."""
        return int(abs(_probabilities(self.generation_N) - _probabilities(self.training_N)).argmax())

    @property
    def largest_relative(self) -> int:
        """Index into N of the token with the largest ratio of probabilities."""
        return int(abs(self.difference).argmax())


def token_error_figure(data: Mapping[str, Any]) -> tuple[Figure | None, str]:
    """A figure of the worst sample, or None and the reason why there is none."""
    try:
        require_package("matplotlib", "a plot of token errors", extra="plots")
        return _drawn(worst_sample(data)), ""
    except (ConfigError, DataError) as error:
        return None, str(error)


def worst_sample(data: Mapping[str, Any]) -> WorstSample:
    """The sample with the largest error; the first of equal ones.

    Raises:
        DataError: a column is missing or has a wrong shape, or no valid token has finite log-probabilities.
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
    if not valid_BT.any() and num_skipped:
        raise DataError(
            f"all {num_skipped} valid tokens have log-probabilities that are not finite; check generation_logprobs and "
            "prev_logprobs"
        )
    if not valid_BT.any():
        raise DataError(
            "token_mask and sample_mask leave no valid token in any response; set both to 1 for the tokens to compare, "
            "and check prompt_lengths and full_lengths"
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
            raise DataError(f"the data has no column {name!r}; add it")
        column = data[name]
        # Through torch's float64, because numpy lacks bfloat16.
        plain = column.detach().cpu().double() if hasattr(column, "detach") else column
        try:
            columns[name] = np.asarray(plain, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(f"column {name!r} is not an array of numbers: {error}") from error
    shape = columns["token_mask"].shape
    if len(shape) != 2:
        raise DataError(f"column 'token_mask' has shape {shape}; it must have the shape [rows, tokens]")
    for name, column in columns.items():
        if column.shape != (shape if name in _TOKEN_COLUMNS else shape[:1]):
            expected = shape if name in _TOKEN_COLUMNS else shape[:1]
            raise DataError(f"column {name!r} has shape {column.shape}, but must have {expected} to match token_mask")
    return columns


def _log_mean_exp(values_BT: np.ndarray, mask_BT: np.ndarray) -> np.ndarray:
    """[B] log of the masked mean of exp(values), without overflow; -inf for a row without valid tokens."""
    import numpy as np

    sums_B = np.logaddexp.reduce(values_BT, axis=1, where=mask_BT, initial=-np.inf)
    return sums_B - np.log(np.maximum(mask_BT.sum(axis=1), 1))


def _probabilities(logprobs: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.exp(np.minimum(logprobs, 0))  # rounding errors and wrong inputs may be above 0


def _drawn(worst: WorstSample) -> Figure:
    # Unlike pyplot, a Figure needs no display and no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    title = f"sample {worst.index}: error {_factor(worst.log_error)} over {len(worst.positions_N)} tokens"
    if worst.num_skipped:
        title += f"; tokens of the batch left out as not finite: {worst.num_skipped}"
    figure.suptitle(title)
    generation_N, training_N = _probabilities(worst.generation_N), _probabilities(worst.training_N)
    token = worst.largest_absolute
    _plot_curve(upper, worst.positions_N, generation_N, "generation")
    _plot_curve(upper, worst.positions_N, training_N, "training (prev_logprobs)")
    label = f"largest absolute error {abs(generation_N[token] - training_N[token]):.4g}"
    _mark(upper, worst.positions_N[token], generation_N[token], label)
    upper.set_ylabel("probability")
    token, difference_N = worst.largest_relative, worst.difference
    _plot_curve(lower, worst.positions_N, difference_N, "generation - training")
    label = f"largest relative error {_factor(abs(difference_N[token]))}"
    _mark(lower, worst.positions_N[token], difference_N[token], label)
    lower.axhline(0, color="gray", linewidth=0.5)
    lower.set(ylabel="difference of log-probabilities", xlabel="position in the response, in tokens")
    for axes in (upper, lower):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)  # above the curves
    return figure


def _plot_curve(axes: Axes, positions_N: np.ndarray, values_N: np.ndarray, label: str) -> None:
    """Plot a line with gaps at masked tokens."""
    import numpy as np

    curve = np.full(positions_N[-1] + 1, np.nan)
    curve[positions_N] = values_N
    axes.plot(curve, marker=".", markersize=3, linewidth=1, label=label)


def _mark(axes: Axes, position: int, value: float, label: str) -> None:
    axes.plot(position, value, "o", color="tab:red", fillstyle="none", label=f"{label} at token {position}")


def _factor(log_ratio: float) -> str:
    return f"x{math.exp(log_ratio):.4g}" if log_ratio < 700 else f"xe^{log_ratio:.4g}"
