"""The plot of token errors shows the right sample and tokens, or a reason is returned."""

import math
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from lucidrl.utils.logger.interface import png_of
from lucidrl.utils.logger.token_error import token_error_figure, worst_sample

NAN, INF = float("nan"), float("inf")


def batch(generation, training, **changes):
    """Rows with a prompt of one token; everything after it counts."""
    generation, training = torch.tensor(generation), torch.tensor(training)
    rows, tokens = generation.shape
    columns = {
        "generation_logprobs": generation,
        "prev_logprobs": training,
        "token_mask": torch.ones(rows, tokens),
        "sample_mask": torch.ones(rows),
        "prompt_lengths": torch.ones(rows, dtype=torch.int64),
        "full_lengths": torch.full((rows,), tokens),
    }
    return columns | changes


def test_the_sample_with_the_largest_mean_of_token_errors_is_found():
    # Row 0 has the largest single error, row 1 the largest mean.
    data = batch([[0.0, -1, -1, -1], [0, -2, -2, -2]], [[0.0, -2.5, -1, -1], [0, -1, -1, -1]])
    worst = worst_sample(data)
    assert worst.index == 1
    assert math.exp(worst.log_error) == pytest.approx(math.e)
    assert worst.positions_N.tolist() == [0, 1, 2]
    assert worst.difference.tolist() == [-1, -1, -1]


def test_only_valid_tokens_of_valid_samples_count():
    clean = [0.0, -1.0, -1.0, -1.0]
    data = batch(
        [[9.0, *clean[1:]], [0.0, -1, -1, 9], [0.0, -1, 9, -1], [0.0, -9, -9, -9], [0.0, -1, -1.1, -1]],
        [clean] * 5,
        token_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]]),
        sample_mask=torch.tensor([1.0, 1, 1, 0, 0.5]),
        full_lengths=torch.tensor([4, 3, 4, 4, 4]),
    )
    worst = worst_sample(data)
    assert worst.index == 4
    assert math.exp(worst.log_error) == pytest.approx((2 + math.exp(0.1)) / 3)


def test_a_sample_without_valid_tokens_never_wins():
    data = batch([[0.0, -1.0], [0.0, -1.0]], [[0.0, -9.0], [0.0, -1.0]], token_mask=torch.tensor([[0, 0], [0, 1]]))
    assert worst_sample(data).index == 1


def test_absolute_and_relative_errors_may_be_of_different_tokens():
    # 0.9 against 0.5 is the largest distance, 1e-6 against 1e-4 the largest ratio.
    data = batch([[0.0, math.log(0.9), -1.0, math.log(1e-6)]], [[0.0, math.log(0.5), -1.0, math.log(1e-4)]])
    worst = worst_sample(data)
    assert (worst.largest_absolute, worst.largest_relative) == (0, 2)


def test_positions_count_from_the_prompt_and_skip_masked_tokens():
    data = batch(
        [[-1.0] * 6], [[-2.0] * 6], token_mask=torch.tensor([[0, 0, 1, 1, 0, 1]]), prompt_lengths=torch.tensor([2])
    )
    assert worst_sample(data).positions_N.tolist() == [0, 1, 3]


def test_tokens_that_are_not_finite_are_left_out_and_counted():
    data = batch([[0.0, NAN, -1.0, -INF], [0.0, -1.5, -1.0, -1.0]], [[0.0, -1.0, -1.0, -INF], [0.0, -1.0, -1.0, INF]])
    worst = worst_sample(data)
    assert worst.index == 1
    assert worst.num_skipped == 3
    assert np.isfinite(worst.difference).all()


def test_errors_beyond_any_float_are_still_compared():
    worst = worst_sample(batch([[0.0, -2000.0], [0.0, -3000.0]], [[0.0, 0.0], [0.0, 0.0]]))
    assert worst.index == 1
    assert worst.log_error == 3000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_with_gradients_is_read(dtype):
    data = batch([[0.0, -1.0], [0.0, -2.0]], [[0.0, -1.0], [0.0, -1.0]])
    for name in ("generation_logprobs", "prev_logprobs"):
        data[name] = data[name].to(dtype).requires_grad_()
    data["token_mask"] = data["token_mask"].bool().numpy()
    data["sample_mask"] = [True, True]
    assert worst_sample(data).log_error == pytest.approx(1.0)


GOOD = batch([[0.0, -1.0]], [[0.0, -1.5]])


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_missing_column_is_named(name):
    figure, reason = token_error_figure({key: value for key, value in GOOD.items() if key != name})
    assert figure is None
    assert repr(name) in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_mask": torch.zeros(1, 2)}, "leave no valid token in any response"),
        ({"sample_mask": torch.zeros(1)}, "leave no valid token in any response"),
        ({"prompt_lengths": torch.tensor([2])}, "leave no valid token in any response"),
        ({"full_lengths": torch.tensor([-5])}, "leave no valid token in any response"),
        ({"prompt_lengths": torch.tensor([NAN])}, "leave no valid token in any response"),
        ({"prev_logprobs": torch.full((1, 2), NAN)}, "all 1 valid tokens .* not finite"),
        ({"prev_logprobs": torch.zeros(1, 3)}, r"'prev_logprobs' has shape \(1, 3\)"),
        ({"sample_mask": torch.ones(1, 1)}, r"'sample_mask' has shape \(1, 1\)"),
        ({"token_mask": torch.ones(2)}, r"'token_mask' has shape \(2,\)"),
        ({"full_lengths": ["long"]}, "'full_lengths' is not an array of numbers"),
        ({"prev_logprobs": [[1.0], [1.0, 2.0]]}, "'prev_logprobs' is not an array of numbers"),
        ({"prev_logprobs": None}, "no column 'prev_logprobs'"),
    ],
)
def test_nothing_to_plot_returns_a_reason(changes, reason):
    figure, given_reason = token_error_figure(GOOD | changes)
    assert figure is None
    assert re.search(reason, given_reason)


def test_an_empty_batch_returns_a_reason():
    figure, reason = token_error_figure({name: column[:0] for name, column in GOOD.items()})
    assert figure is None
    assert "no valid token" in reason


def test_lengths_beyond_the_tensor_are_clipped():
    changes = {"full_lengths": torch.tensor([99]), "prompt_lengths": torch.tensor([-INF])}
    assert worst_sample(GOOD | changes).positions_N.tolist() == [0, 1]


def test_the_figure_has_titles_labels_and_curves():
    data = batch([[0.0, -1.0, -2.0, NAN]], [[0.0, -1.0, -2.5, -1.0]])
    figure, reason = token_error_figure(data)
    assert isinstance(figure, Figure)
    assert reason == ""
    assert (
        figure.get_suptitle() == "sample 0: error x1.324 over 2 tokens; tokens of the batch left out as not finite: 1"
    )
    upper, lower = figure.axes
    curves = {line.get_label(): list(line.get_ydata()) for line in upper.lines + lower.lines}
    assert curves["generation"] == pytest.approx([math.exp(-1), math.exp(-2)])
    assert curves["training (prev_logprobs)"] == pytest.approx([math.exp(-1), math.exp(-2.5)])
    assert curves["generation - training"] == [0, 0.5]
    assert curves["largest absolute error 0.05325 at token 1"] == pytest.approx([math.exp(-2)])
    assert curves["largest relative error x1.649 at token 1"] == [0.5]


def test_a_figure_becomes_one_picture_in_many_threads():
    figure, _ = token_error_figure(GOOD)
    pictures = []
    threads = [threading.Thread(target=lambda: pictures.append(png_of(figure))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pictures)) == 1
    assert pictures[0].startswith(b"\x89PNG")


def test_drawing_does_not_import_pyplot_and_a_missing_matplotlib_returns_a_reason():
    code = """
import sys
import lucidrl.utils.logger.token_error as token_error
assert "matplotlib" not in sys.modules and "numpy" not in sys.modules and "torch" not in sys.modules
row = [[0.0, -1.0]]
data = {"generation_logprobs": row, "prev_logprobs": row, "token_mask": row, "sample_mask": [1], "prompt_lengths": [0]}
data["full_lengths"] = [2]
assert token_error.token_error_figure(data)[0] is not None
assert "matplotlib.pyplot" not in sys.modules
import importlib.util
importlib.util.find_spec = lambda name: None
print(token_error.token_error_figure(data))
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'needs the package matplotlib; pip install "lucidrl[plots]"' in result.stdout
