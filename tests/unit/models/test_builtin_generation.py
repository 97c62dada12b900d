"""The built-in engine samples the tokens of the model's own code; completions do not depend on their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.errors import DataError
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.decode_layout import DecodeLayout
from lucidrl.models.generation.kv_cache import PrefillLayout
from lucidrl.models.generation.sampling import draw_key
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 30], [5, 6, 7, 8, 9, 10, 11, 12, 13], [44], [20, 30], [20, 30, 31, 32]]


@pytest.fixture
def generator_of(tokenizer) -> Callable[..., BuiltinGenerator]:
    def make(name: str, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> BuiltinGenerator:
        config = GenerationConfig(**options)
        return BuiltinGenerator(LogprobModel(load_model(name, dtype), config.temperature), tokenizer, config, seed)

    return make


def as_batch(prompts: list[list[int]], **columns: Any) -> BatchedDataDict[Any]:
    width = max(map(len, prompts), default=0) + 2
    padded = [prompt + [99] * (width - len(prompt)) for prompt in prompts]
    input_ids = torch.tensor(padded, dtype=torch.int64).view(len(prompts), width)
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
    return BatchedDataDict({"input_ids": input_ids, "input_lengths": lengths, **columns})


def keyed_batch(prompts: list[list[int]], names: list[int], **columns: Any) -> BatchedDataDict[Any]:
    return as_batch(prompts, draw_keys=torch.tensor([draw_key("row", name) for name in names]), **columns)


def chat_prompts(tokenizer, *questions: str) -> list[list[int]]:
    return [tokenizer(f"<|user|>{question}<|assistant|>")["input_ids"] for question in questions]


def completed(output: BatchedDataDict[Any]) -> list[list[int]]:
    ends, counts = output["unpadded_sequence_lengths"].tolist(), output["generation_lengths"].tolist()
    return [row[end - n : end].tolist() for row, end, n in zip(output["output_ids"], ends, counts, strict=True)]


class CallSpy:
    """Records the inputs of every forward call of the model."""

    def __init__(self, monkeypatch):
        self.prefilled_tokens: list[int] = []
        self.decoded_rows: list[int] = []
        own = LogprobModel.hidden_states

        def hidden_states(model, input_ids, position_ids, layout):
            if isinstance(layout, PrefillLayout):
                self.prefilled_tokens.append(input_ids.numel())
            if isinstance(layout, DecodeLayout):
                self.decoded_rows.append(len(input_ids))
            return own(model, input_ids, position_ids, layout)

        monkeypatch.setattr(LogprobModel, "hidden_states", hidden_states)


def test_greedy_tokens_equal_those_of_transformers(every_model, generator_of):
    output = generator_of(every_model, max_new_tokens=20).generate(as_batch(PROMPTS), greedy=True)
    own = AutoModelForCausalLM.from_pretrained(every_model, dtype=torch.float64, attn_implementation="eager")
    for row, prompt in enumerate(PROMPTS):
        tokens = own.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=20,
        )
        assert completed(output)[row] == tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_generation_and_scoring_agree_on_logprobs(generator_of, tokenizer, temperature):
    generator = generator_of("embedded", torch.float32, max_new_tokens=40, temperature=temperature)
    prompts = chat_prompts(tokenizer, "12+30=", "7-4=", "7-4=", "What is 99+1?") * 4
    output = generator.generate(as_batch(prompts))
    assert output["generation_lengths"].max() > 1
    with torch.no_grad():
        scored = generator.model(output["output_ids"], output["unpadded_sequence_lengths"]).logprobs
    position, ends = torch.arange(output["output_ids"].shape[1]), output["unpadded_sequence_lengths"][:, None]
    is_completion = (position < ends) & (position >= ends - output["generation_lengths"][:, None])
    torch.testing.assert_close(output["logprobs"][is_completion], scored[is_completion], rtol=0, atol=1e-5)


def test_logprobs_of_every_architecture_are_those_of_scoring(every_model, generator_of):
    generator = generator_of(every_model, max_new_tokens=20, temperature=0.7)
    output = generator.generate(as_batch(PROMPTS))
    with torch.no_grad():
        scored = generator.model(output["output_ids"], output["unpadded_sequence_lengths"]).logprobs
    is_completion = output["logprobs"] != 0
    torch.testing.assert_close(output["logprobs"][is_completion], scored[is_completion].float(), rtol=0, atol=1e-5)


def test_output_layout(generator_of, tokenizer):
    output = generator_of("embedded-untrained", max_new_tokens=6).generate(as_batch(PROMPTS))
    lengths, totals = output["generation_lengths"], output["unpadded_sequence_lengths"]
    assert totals.tolist() == [len(prompt) + n for prompt, n in zip(PROMPTS, lengths.tolist(), strict=True)]
    assert output["output_ids"].shape == output["logprobs"].shape == (len(PROMPTS), int(totals.max()))
    assert output["logprobs"].dtype == torch.float32
    for row, prompt in enumerate(PROMPTS):
        end = int(totals[row])
        assert output["output_ids"][row, : len(prompt)].tolist() == prompt
        assert (output["output_ids"][row, end:] == tokenizer.pad_token_id).all()
        assert (output["logprobs"][row, len(prompt) : end] < 0).all()
        assert not output["logprobs"][row, : len(prompt)].any()
        assert not output["logprobs"][row, end:].any()


@pytest.mark.parametrize("name", ["mistral_sliding", "gemma2_sliding_capped", "gpt2_learned_positions"])
def test_a_completion_depends_on_its_own_row_alone(tiny_model, generator_of, name):
    """Not on other rows, their order, the batch size, or rows that finished before."""
    options = {"max_new_tokens": 30, "stop_token_ids": tuple(range(2, 12))}
    generator = generator_of(tiny_model(name), **options)
    prompts = PROMPTS * 3
    alone = [completed(generator.generate(keyed_batch([prompt], [row])))[0] for row, prompt in enumerate(prompts)]
    assert len(set(map(len, alone))) > 5  # rows end at different times, so the batch is compacted on the way
    shuffled = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    for order, max_concurrent_rows in ((range(len(prompts)), 512), (shuffled, 512), (shuffled, 4), ([3, 0, 14, 8], 3)):
        generator = generator_of(tiny_model(name), **options, max_concurrent_rows=max_concurrent_rows)
        together = generator.generate(keyed_batch([prompts[row] for row in order], list(order)))
        assert completed(together) == [alone[row] for row in order]


def test_without_keys_samples_of_a_prompt_differ_and_depend_on_the_seed(generator_of):
    def sampled(seed: int, prompts: list[list[int]]) -> list[list[int]]:
        return completed(generator_of("embedded-untrained", seed=seed, max_new_tokens=8).generate(as_batch(prompts)))

    first = sampled(0, [[20, 30]] * 3 + [[5]])
    assert len(set(map(tuple, first[:3]))) == 3
    assert sampled(0, [[5], [7, 7], *[[20, 30]] * 3]) == [first[3], sampled(0, [[7, 7]])[0], *first[:3]]
    assert sampled(1, [[20, 30]] * 3 + [[5]]) != first


def test_calls_without_keys_use_new_random_numbers(generator_of):
    generator = generator_of("embedded-untrained", max_new_tokens=8)
    assert completed(generator.generate(as_batch([[5]]))) != completed(generator.generate(as_batch([[5]])))


def test_each_distinct_prompt_is_prefilled_once(monkeypatch, tiny_model, generator_of):
    generator = generator_of(tiny_model("llama"), max_new_tokens=3)
    spy = CallSpy(monkeypatch)
    generator.generate(as_batch(PROMPTS * 5))
    assert spy.prefilled_tokens == [sum(len(prompt) for prompt in set(map(tuple, PROMPTS)))]


def test_at_most_max_concurrent_rows_are_decoded_at_a_time(monkeypatch, tiny_model, generator_of):
    generator = generator_of(tiny_model("llama"), max_new_tokens=3, max_concurrent_rows=4)
    spy = CallSpy(monkeypatch)
    generator.generate(as_batch(PROMPTS))
    assert max(spy.decoded_rows) == 4
    assert len(spy.prefilled_tokens) == 2


def test_finished_rows_leave_the_batch(monkeypatch, tiny_model, generator_of):
    generator = generator_of(tiny_model("llama"), max_new_tokens=40, stop_token_ids=tuple(range(2, 30)))
    spy = CallSpy(monkeypatch)
    output = generator.generate(as_batch(PROMPTS * 8))
    num_active = [int((output["generation_lengths"] > step).sum()) for step in range(1, 40)]
    assert num_active[0] > num_active[-1]
    for decoded, active in zip(spy.decoded_rows, num_active, strict=False):
        assert active <= decoded <= max(active / (7 / 8), active + 1)
    assert len(spy.decoded_rows) == sum(active > 0 for active in num_active)


def test_any_of_several_stop_tokens_ends_a_completion(tiny_model, generator_of):
    stops = (40, 50, 60, 70, 80)
    generator = generator_of(tiny_model("llama"), max_new_tokens=60, temperature=2.0, stop_token_ids=stops)
    output = generator.generate(as_batch(PROMPTS * 6))
    ends = {tokens[-1] for tokens, cut in zip(completed(output), output["truncated"], strict=True) if not cut}
    assert len(ends & set(stops)) >= 3
    assert ends <= {1, *stops}
    assert not any({1, *stops} & set(tokens[:-1]) for tokens in completed(output))


def test_stop_tokens_of_the_model_end_a_completion(tiny_model, tokenizer):
    model = LogprobModel(load_model(tiny_model("llama"), torch.float64), 2.0)
    model.model.generation_config.eos_token_id = [90, 91, 92]
    generator = BuiltinGenerator(model, tokenizer, GenerationConfig(max_new_tokens=80, temperature=2.0))
    output = generator.generate(as_batch(PROMPTS * 4))
    ends = {tokens[-1] for tokens, cut in zip(completed(output), output["truncated"], strict=True) if not cut}
    assert ends <= {1, 90, 91, 92}
    assert ends & {90, 91, 92}


def test_truncated_marks_completions_at_the_token_limit(tiny_model, generator_of):
    generator = generator_of(tiny_model("llama"), max_new_tokens=10, stop_token_ids=tuple(range(2, 20)))
    output = generator.generate(as_batch(PROMPTS * 6))
    assert set(output["truncated"].tolist()) == {True, False}
    for tokens, cut in zip(completed(output), output["truncated"].tolist(), strict=True):
        assert cut == (tokens[-1] not in range(1, 20))
        assert len(tokens) == 10 or not cut


def test_a_stop_token_at_the_limit_is_not_a_truncation(tiny_model, generator_of):
    batch = as_batch([[20, 30]])
    free = completed(generator_of(tiny_model("llama"), max_new_tokens=5).generate(batch, greedy=True))[0]
    stop = free[-1]
    length = free.index(stop) + 1
    generator = generator_of(tiny_model("llama"), max_new_tokens=length, stop_token_ids=(stop,))
    output = generator.generate(batch, greedy=True)
    assert output["generation_lengths"].tolist() == [length]
    assert output["truncated"].tolist() == [False]


@pytest.fixture
def plain_completion(tiny_model, generator_of, tokenizer) -> tuple[int, str]:
    """A row whose completion of the first prompt has characters only, and that completion."""
    output = generator_of(tiny_model("llama"), max_new_tokens=12).generate(keyed_batch([PROMPTS[0]] * 40, [*range(40)]))
    texts = [tokenizer.decode(tokens) for tokens in completed(output)]
    return next((row, text) for row, text in enumerate(texts) if len(text) == len(set(text)) == 12)


def test_stop_strings_span_tokens_and_apply_to_their_row_only(tiny_model, generator_of, tokenizer, plain_completion):
    row, text = plain_completion
    stops = [[text[3:6]], None, ["never sampled", text[6:8]], []]
    generator = generator_of(tiny_model("llama"), max_new_tokens=12)
    output = generator.generate(keyed_batch([PROMPTS[0]] * 4, [row] * 4, stop_strings=stops))
    assert [tokenizer.decode(tokens) for tokens in completed(output)] == [text[:6], text, text[:8], text]
    assert output["truncated"].tolist() == [False, True, False, True]


def test_configured_stop_strings_apply_to_every_row(tiny_model, generator_of, tokenizer, plain_completion):
    row, text = plain_completion
    generator = generator_of(tiny_model("llama"), max_new_tokens=12, stop_strings=(text[2:5],))
    output = generator.generate(keyed_batch([PROMPTS[0]] * 2, [row] * 2, stop_strings=[None, [text[0]]]))
    assert [tokenizer.decode(tokens) for tokens in completed(output)] == [text[:5], text[:1]]


def test_a_stop_string_in_the_prompt_does_not_stop(tiny_model, generator_of, tokenizer, plain_completion):
    row, text = plain_completion
    stop = tokenizer.decode(PROMPTS[0][-1:]) + text[0]
    generator = generator_of(tiny_model("llama"), max_new_tokens=12, stop_strings=(stop,))
    output = generator.generate(keyed_batch([PROMPTS[0]], [row]))
    assert tokenizer.decode(completed(output)[0]) == text


@pytest.mark.parametrize("name", ["llama", "gpt2_learned_positions"])
def test_the_context_of_the_model_limits_a_completion(tiny_model, generator_of, name):
    """Rows near the end of the context are truncated; other rows go on."""
    long, short = list(range(2, 90)) + list(range(2, 37)), [20, 30]
    assert len(long) == 123
    generator = generator_of(tiny_model(name), max_new_tokens=20)
    generator.engine._stop_ids = set()
    output = generator.generate(as_batch([long, *[short] * 9]), greedy=True)
    assert output["generation_lengths"].tolist() == [5, *[20] * 9]
    assert output["truncated"].all()


@pytest.mark.parametrize("length", [0, 128, 140])
def test_an_empty_or_too_long_prompt_is_refused(tiny_model, generator_of, length):
    with pytest.raises(DataError, match=rf"the prompt of row 1 has {length} tokens; give it at least 1 and at"):
        generator_of(tiny_model("llama")).generate(as_batch([[5], [7] * length]))


def test_an_empty_batch_gives_an_empty_batch(tiny_model, generator_of):
    output = generator_of(tiny_model("llama")).generate(as_batch([]))
    assert output.size == 0
    assert output["output_ids"].shape == (0, 0)


@pytest.mark.parametrize("was_training", [True, False])
def test_the_training_flag_is_restored(tiny_model, generator_of, was_training):
    generator = generator_of(tiny_model("llama"), max_new_tokens=2)
    generator.model.train(was_training)
    seen = []
    generator.model.model.model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    generator.generate(as_batch([[5]]))
    assert seen
    assert not any(seen)
    assert generator.model.training is was_training
    with pytest.raises(DataError):
        generator.generate(as_batch([[5], []]))
    assert generator.model.training is was_training


def test_no_autograd_graph_is_kept(tiny_model, generator_of):
    output = generator_of(tiny_model("llama"), max_new_tokens=2).generate(as_batch([[5]]))
    assert not output["logprobs"].requires_grad


def test_new_weights_are_used_at_the_next_call(tiny_model, generator_of):
    generator = generator_of(tiny_model("llama"), max_new_tokens=10)
    before = completed(generator.generate(as_batch([[5]]), greedy=True))
    with torch.no_grad():
        for parameter in generator.model.parameters():
            parameter.neg_()
    assert completed(generator.generate(as_batch([[5]]), greedy=True)) != before
