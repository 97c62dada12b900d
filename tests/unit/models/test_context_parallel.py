"""Rows that are split over ranks give the results of whole rows on one rank; buffers are restored."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lucidrl.errors import ConfigError, DataError
from lucidrl.models.attention import AttentionCall, PaddedLayout
from lucidrl.models.context_parallel import ContextParallel, create_context_parallel_ctx, train_context
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel

MODELS = ("llama", "qwen3", "mistral_sliding", "gemma2_sliding_capped")
LENGTH = 16
ROW_LENGTHS = (7, 16, 2, 12)


@dataclass(frozen=True)
class Pass:
    """Results of one rank."""

    positions: torch.Tensor
    hidden: torch.Tensor
    """[B, T / N, D] at these positions."""
    loss: float
    gradients: dict[str, torch.Tensor]


def split_of(rank: int, size: int) -> ContextParallel:
    """The split on that rank, without communication."""
    return ContextParallel(SimpleNamespace(rank=lambda: rank, size=lambda: size))


def run_model(folder: str, input_ids: torch.Tensor, parallel: ContextParallel | None) -> Pass:
    """A loss that weighs every hidden state of a row differently and couples those of all ranks."""
    model = LogprobModel(load_model(folder, torch.float64), 1.0)
    rows, length = input_ids.shape
    positions = torch.arange(length) if parallel is None else parallel.positions(length)
    layout = PaddedLayout() if parallel is None else parallel
    own_ids = input_ids[:, positions]
    hidden = model.hidden_states(own_ids, positions.expand_as(own_ids), layout).view(rows, len(positions), -1)

    weights = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own_values = torch.zeros(rows, length, dtype=torch.float64).index_copy(1, positions, hidden @ weights)
    values = own_values if parallel is None else parallel.sum(own_values)
    counts = torch.arange(length) < torch.tensor(ROW_LENGTHS)[:, None]
    loss = (values * counts).sum(1).tanh().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Pass(positions, hidden.detach(), float(loss.detach()), gradients)


def run_split_model(folder: str, input_ids: torch.Tensor) -> Pass:
    return run_model(folder, input_ids, ContextParallel(dist.group.WORLD))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_split_rows_give_the_hidden_states_and_gradients_of_whole_rows(request, tiny_model, name, num_ranks):
    ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[num_ranks])
    input_ids = torch.randint(2, 20, (len(ROW_LENGTHS), LENGTH), generator=torch.Generator().manual_seed(0))

    whole = run_model(tiny_model(name), input_ids, None)
    parts = ranks(run_split_model, tiny_model(name), input_ids)

    for part in parts:
        torch.testing.assert_close(part.hidden, whole.hidden[:, part.positions], rtol=0, atol=1e-12)
        assert part.loss == pytest.approx(whole.loss, abs=1e-12)
        assert part.gradients.keys() == whole.gradients.keys()
    for parameter, expected in whole.gradients.items():
        total = sum(part.gradients[parameter] for part in parts)
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-9)


def attend_split(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> Any:
    parallel = ContextParallel(dist.group.WORLD)
    positions = parallel.positions(query.shape[2])
    own = [tensor[:, :, positions].requires_grad_() for tensor in (query, key, value)]
    recompute = options.pop("recompute")

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return parallel.attend(AttentionCall(*tensors, layer=0, dropout=0.0, **options))

    output = checkpoint(attend, *own, use_reentrant=False) if recompute else attend(*own)
    output.square().sum().backward()
    return positions, output.detach(), [tensor.grad for tensor in own]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 11, 100])
def test_attention_of_a_split_row_equals_that_of_the_whole_row(four_ranks, window, softcap, recompute):
    torch.manual_seed(0)
    # As in some architectures, the heads of values have another size than those of keys.
    tensors = [torch.randn(2, heads, 24, size).double() for heads, size in ((6, 8), (2, 8), (2, 4))]
    options = {"scaling": 0.4, "window": window, "softcap": softcap}

    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    whole = PaddedLayout().attend(AttentionCall(*leaves, layer=0, dropout=0.0, **options))
    whole.square().sum().backward()

    for positions, output, gradients in four_ranks(attend_split, *tensors, options | {"recompute": recompute}):
        torch.testing.assert_close(output, whole[:, positions].detach(), rtol=0, atol=1e-12)
        for gradient, leaf in zip(gradients, leaves, strict=True):
            torch.testing.assert_close(gradient, leaf.grad[:, :, positions], rtol=0, atol=1e-12)


def largest_error_in_half_precision(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    positions, output, _ = attend_split(
        query, key, value, {"scaling": 0.4, "window": None, "softcap": None, "recompute": False}
    )
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.4).transpose(1, 2)
    return float((output - whole[:, positions]).abs().max())


def test_attention_is_split_in_half_precision_too(two_ranks):
    tensors = [torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    assert max(two_ranks(largest_error_in_half_precision, *tensors)) < 0.02


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunk_length", [1, 2, 5])
def test_every_position_has_one_rank_and_every_rank_has_the_same_work(size, chunk_length):
    length = 2 * size * chunk_length
    positions = [split_of(rank, size).positions(length) for rank in range(size)]
    assert torch.cat(positions).sort().values.tolist() == list(range(length))
    assert len({len(own) for own in positions}) == 1
    # A token at position p sees p + 1 keys.
    assert len({int((own + 1).sum()) for own in positions}) == 1


def test_a_length_that_is_not_a_multiple_is_refused():
    parallel = split_of(rank=0, size=2)
    assert parallel.multiple == 4
    with pytest.raises(DataError, match=r"rows of 10 tokens .* over 2 context-parallel ranks; pad .* multiple of 4"):
        parallel.positions(10)


def shard_and_restore(fail: bool) -> dict[str, Any]:
    tokens, column, dropped = torch.arange(16).view(2, 8), torch.arange(8.0)[:, None], torch.arange(8)
    aliases = tokens[0]
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    seen: dict[str, Any] = {}
    try:
        with train_context(
            create_context_parallel_ctx(mesh["cp"], [tokens, column, dropped], [1, 0, -1], {dropped}, "allgather")
        ):
            seen["inside"] = [tokens.tolist(), column[:, 0].tolist(), dropped.tolist()]
            tokens.fill_(-1)
            if fail:
                raise KeyError("in the loop")
    except KeyError:
        seen["failed"] = True
    seen["after"] = [tokens.tolist(), column[:, 0].tolist(), dropped.tolist()]
    seen["own memory"] = aliases.data_ptr() == tokens.data_ptr()
    return seen


@pytest.mark.parametrize("fail", [False, True])
def test_buffers_are_sharded_inside_the_context_and_whole_after_it(two_ranks, fail):
    whole = [torch.arange(16).view(2, 8).tolist(), list(range(8))]
    for own, seen in zip(([0, 1, 6, 7], [2, 3, 4, 5]), two_ranks(shard_and_restore, fail), strict=True):
        assert seen["inside"] == [[own, [p + 8 for p in own]], own, own]
        assert seen["after"] == [*whole, own]
        assert seen["own memory"]
        assert seen.get("failed", False) == fail


def refusals_of_the_context() -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    good, bad = torch.arange(8), torch.arange(6)
    sentences = []
    for buffers, dims, method in (([good, bad], [0, 0], None), ([good], [0, 1], None), ([good], [0], "alltoall")):
        with (
            pytest.raises((ConfigError, DataError)) as refused,
            create_context_parallel_ctx(mesh, buffers, dims, set(), method),
        ):
            pass
        sentences.append(str(refused.value))
    assert good.tolist() == list(range(8)), "a refusal changes no buffer"
    return sentences


def test_the_context_refuses_invalid_arguments(two_ranks):
    length, dims, method = two_ranks(refusals_of_the_context)[0]
    assert "rows of 6 tokens" in length
    assert "multiple of 4" in length
    assert "1 cp_buffers have 2 cp_seq_dims" in dims
    assert "cp_rotate_method='alltoall'" in method


def test_training_without_context_parallelism_needs_no_context():
    with train_context():
        pass
    with train_context(None):
        pass
