"""Log-probabilities equal those of the model's own code in every layout of the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from lucidrl.errors import ConfigError
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel
from tests.tiers import slow_except

every_temperature = pytest.mark.parametrize("temperature", slow_except([0.7, 1.3], 1.3))


def rows_alone(rows) -> Iterator[torch.Tensor]:
    """The tokens [1, length] of each row, without padding."""
    for tokens, length in zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True):
        yield tokens[None, :length]


def laid_out(values_of_rows: Iterable[torch.Tensor], width: int) -> torch.Tensor:
    """[B, width] of values [1, length], padded with zeros."""
    return torch.cat([F.pad(values, (0, width - values.shape[1])) for values in values_of_rows])


@every_temperature
@pytest.mark.parametrize("kernel", slow_except(["eager", "sdpa"], "eager"))
def test_logprobs_equal_those_of_transformers(every_model, make_rows, temperature, kernel):
    rows = make_rows()
    ours = load_model(every_model, torch.float32)
    if kernel == "sdpa" and getattr(ours.config, "attn_logit_softcapping", None):
        pytest.skip("the fused kernel of transformers leaves soft caps out")
    theirs = AutoModelForCausalLM.from_pretrained(every_model, dtype=torch.float32, attn_implementation=kernel)

    def own_logprobs(tokens: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(theirs(input_ids=tokens).logits[:, :-1] / temperature, dim=-1)
        return F.pad(log_p.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))

    with torch.no_grad():
        found = LogprobModel(ours, temperature)(rows["input_ids"], rows["input_lengths"]).logprobs
        expected = laid_out(map(own_logprobs, rows_alone(rows)), rows["input_ids"].shape[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@every_temperature
def test_padded_packed_and_single_rows_agree(every_model, make_rows, temperature):
    rows = make_rows()
    width = rows["input_ids"].shape[1]
    needs = frozenset({"logprobs", "entropy", "logits"})
    model = LogprobModel(load_model(every_model, torch.float64), temperature)
    with torch.no_grad():
        alone = [model(tokens, torch.tensor([tokens.shape[1]]), needs) for tokens in rows_alone(rows)]
        for packed in (False, True):
            together = model(rows["input_ids"], rows["input_lengths"], needs, packed=packed)
            for name in ("logprobs", "entropy"):
                expected = laid_out((getattr(outputs, name) for outputs in alone), width)
                torch.testing.assert_close(getattr(together, name), expected, rtol=0, atol=1e-9)
            for row, outputs in enumerate(alone):
                logits = together.logits[row : row + 1, : outputs.logits.shape[1]]
                torch.testing.assert_close(logits, outputs.logits, rtol=0, atol=1e-9)


def test_entropy_and_logits_belong_to_the_scored_distribution(every_model, make_rows):
    """Position i of the logits predicts token i + 1, at the temperature."""
    rows = make_rows()
    model = LogprobModel(load_model(every_model, torch.float64), 0.7)
    with torch.no_grad():
        outputs = model(rows["input_ids"], rows["input_lengths"], frozenset({"logprobs", "entropy", "logits"}))
    log_p = torch.log_softmax(outputs.logits[3, :11], dim=-1)
    torch.testing.assert_close(outputs.entropy[3, 1:12], -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-9)
    chosen = log_p.gather(1, rows["input_ids"][3, 1:12, None])[:, 0]
    torch.testing.assert_close(outputs.logprobs[3, 1:12], chosen, rtol=0, atol=1e-9)


def test_a_sliding_window_shorter_than_the_rows_matters(tiny_model, make_rows):
    """Otherwise the tests above would not cover windows."""
    rows = make_rows()
    model = load_model(tiny_model("mistral_sliding"), torch.float64)
    windowed = LogprobModel(model, 1.0)(rows["input_ids"], rows["input_lengths"]).logprobs
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    model.config.sliding_window = None
    unlimited = LogprobModel(model, 1.0)(rows["input_ids"], rows["input_lengths"]).logprobs
    assert torch.equal(windowed[:, :6], unlimited[:, :6])
    assert (windowed[3, 6:] - unlimited[3, 6:]).abs().max() > 0.01


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_only_selected_tokens_are_scored(tiny_model, make_rows, packed):
    rows = make_rows()
    model = LogprobModel(load_model(tiny_model("llama"), torch.float64), 1.0)
    selected = torch.rand(rows["input_ids"].shape, generator=torch.Generator().manual_seed(1)) < 0.5
    everything = model(rows["input_ids"], rows["input_lengths"], packed=packed).logprobs
    some = model(rows["input_ids"], rows["input_lengths"], selected=selected, packed=packed).logprobs
    torch.testing.assert_close(some, everything * selected, rtol=0, atol=1e-12)
    none = model(rows["input_ids"], rows["input_lengths"], selected=selected & False, packed=packed).logprobs
    assert not none.any()
    none.sum().backward()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_gradients_do_not_depend_on_the_layout(every_model, make_rows, packed):
    rows = make_rows()
    model = LogprobModel(load_model(every_model, torch.float64), 0.7)
    model(rows["input_ids"], rows["input_lengths"], packed=packed).logprobs.sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for tokens in rows_alone(rows):
        model(tokens, torch.tensor([tokens.shape[1]])).logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        # Some architectures compute their norms in float32 in every precision.
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def test_unsupported_needs_are_refused(tiny_model, make_rows):
    rows = make_rows()
    model = LogprobModel(load_model(tiny_model("llama"), torch.float32), 1.0)
    with pytest.raises(ConfigError, match=r"needs \['values'\].*only returns"):
        model(rows["input_ids"], rows["input_lengths"], frozenset({"values"}))


@pytest.mark.parametrize("is_training", [False, True])
def test_wrapping_a_model_does_not_change_its_mode(tiny_model, is_training):
    model = LogprobModel(load_model(tiny_model("llama"), torch.float32).train(is_training), 1.0)
    assert {module.training for module in model.modules()} == {is_training}
