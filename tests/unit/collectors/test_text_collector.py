"""TextCollector: rollouts are the sampled tokens with their rewards, reproducible from seed and state."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from lucidrl.algorithms.advantages import group_normalized
from lucidrl.data.config import DataConfig
from lucidrl.data.datasets import Prompt
from lucidrl.data.loading import prompt_dataset
from lucidrl.distributed.config import ClusterConfig
from lucidrl.envs.text.arithmetic import ArithmeticConfig, ArithmeticEnv
from lucidrl.envs.text.config import EnvConfig
from lucidrl.envs.text.guessing import GuessingConfig, GuessingEnv
from lucidrl.envs.text.interfaces import EnvReply
from lucidrl.envs.text.workers import start_env
from lucidrl.errors import DataError, EnvironmentFailure

PAD = 0


@pytest.fixture
def arithmetic():
    return ArithmeticEnv(ArithmeticConfig())


class SampleNumberEnv:
    """Rewards the sample's number if its prompt has signal; `spoil` is called for sample 1."""

    def __init__(self, spoil=None):
        self.spoil = spoil

    async def step(self, batch):
        return [await self._score(request) for request in batch]

    async def _score(self, request):
        number = int(request.sample_id.rpartition("#")[2])
        if self.spoil is not None and request.sample_id == "11+3#1":
            return await self.spoil()
        return EnvReply(float(number) if request.info.get("signal", True) else 1.0)


def tokens_of(rollouts):
    return [[message["token_ids"].tolist() for message in sample.log] for sample in rollouts.samples]


def test_rows_are_exactly_the_tokens_and_logprobs_of_the_generator(make_collector, arithmetic, questions):
    # Untrained, so that completions hold special tokens, which decoded text loses.
    collector = make_collector(arithmetic, questions, model="embedded-untrained")
    rollouts = collector.collect()
    batch = rollouts.to_batch(PAD)
    [(inputs, output)] = collector.generator.record
    width = batch["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"], output["output_ids"][:, :width])
    assert torch.equal(batch["input_lengths"], output["unpadded_sequence_lengths"])
    assert torch.equal(batch["generation_logprobs"], output["logprobs"][:, :width])
    position = torch.arange(width)
    sampled = (position >= inputs["input_lengths"][:, None]) & (position < batch["input_lengths"][:, None])
    assert torch.equal(batch["token_mask"], sampled.float())
    retokenised = [collector._tokenizer.encode(sample.log[-1]["content"]) for sample in rollouts.samples]
    assert retokenised != [sample.log[-1]["token_ids"].tolist() for sample in rollouts.samples]


def test_the_samples_of_a_prompt_form_a_group_with_unique_names(make_collector, arithmetic, questions):
    rollouts = make_collector(arithmetic, questions).collect()
    assert rollouts.group_ids.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    first, second = (rollouts.samples[row].prompt.prompt_id for row in (0, 4))
    assert rollouts.to_batch(PAD)["idx"] == [f"{prompt}#{n}" for prompt in (first, second) for n in range(4)]
    assert rollouts.to_batch(PAD)["sample_mask"].tolist() == [1.0] * 8


def test_a_prompt_that_comes_twice_in_a_step_gets_new_samples(make_collector, arithmetic, questions):
    rollouts = make_collector(arithmetic, questions[:1], model="embedded-untrained").collect()
    assert rollouts.to_batch(PAD)["idx"] == [f"11+3#{n}" for n in range(8)]
    tokens = tokens_of(rollouts)
    assert tokens[:4] != tokens[4:]


def test_only_sampled_tokens_count_in_samples_of_several_turns(make_collector):
    env = GuessingEnv(GuessingConfig(max_number=50, max_turns=5))
    collector = make_collector(env, env.prompts(), max_turns=3)
    rollouts = collector.collect()
    batch = rollouts.to_batch(PAD)
    assert max(sample.turns for sample in rollouts.samples) == 3
    for row, sample in enumerate(rollouts.samples):
        assert [message["role"] for message in sample.log] == ["user", "assistant"] * sample.turns
        mask = [float(message["role"] == "assistant") for message in sample.log for _ in message["token_ids"]]
        assert batch["token_mask"][row].tolist() == mask + [0.0] * (batch["token_mask"].shape[1] - len(mask))


def test_each_turn_continues_the_tokens_of_earlier_turns(make_collector):
    env = GuessingEnv(GuessingConfig(max_number=50, max_turns=5))
    collector = make_collector(env, env.prompts(), max_turns=3)
    rollouts = collector.collect()
    calls = collector.generator.record
    still_open = list(rollouts.samples)
    for turn, (inputs, output) in enumerate(calls, start=1):
        assert len(still_open) == inputs.size
        for row, sample in enumerate(still_open):
            so_far = torch.cat([message["token_ids"] for message in sample.log[: 2 * turn]])
            assert output["output_ids"][row, : output["unpadded_sequence_lengths"][row]].tolist() == so_far.tolist()
        still_open = [sample for sample in still_open if sample.turns > turn]


def test_later_turns_compute_only_their_new_tokens(make_collector):
    env = GuessingEnv(GuessingConfig(max_number=50, max_turns=5))
    collector = make_collector(env, env.prompts(), max_turns=3)
    model = collector.generator.model
    before = model.num_computed_tokens
    samples = collector.collect().samples
    assert max(sample.turns for sample in samples) == 3
    prompts = {tuple(sample.log[0]["token_ids"].tolist()) for sample in samples}
    # The last token of a sample is sampled, but nothing follows it.
    after = [sum(len(message["token_ids"]) for message in sample.log[1:]) - 1 for sample in samples]
    assert model.num_computed_tokens - before == sum(map(len, prompts)) + sum(after)


def test_an_observation_that_does_not_fit_the_context_ends_the_sample(make_collector):
    env = GuessingEnv(GuessingConfig(max_number=50, max_turns=5))
    prompt_length = 1 + len(env.prompts()[0].messages[0]["content"]) + 1
    rollouts = make_collector(env, env.prompts(), max_turns=3, context=prompt_length + 6).collect()
    assert {sample.turns for sample in rollouts.samples} == {1}
    assert rollouts.metrics["truncated_fraction"] == 1.0
    assert rollouts.to_batch(PAD)["input_lengths"].max() <= prompt_length + 6


def test_rollouts_are_bit_exact_with_the_environment_in_workers(make_collector):
    settings = {"max_number": 50, "max_turns": 5}
    prompts = GuessingEnv(GuessingConfig(**settings)).prompts()
    config = EnvConfig(name="guessing", kwargs=settings, num_workers=2)
    collected = []
    for env in (GuessingEnv(GuessingConfig(**settings)), start_env(config, ClusterConfig(num_threads=1))):
        collector = make_collector(env, prompts, model="embedded-untrained", max_turns=3)
        collected.append([collector.collect() for _ in range(2)])
        collector.shutdown()
    for alone, isolated in zip(*collected, strict=True):
        assert tokens_of(isolated) == tokens_of(alone)
        assert torch.equal(isolated.rewards, alone.rewards)
        assert isolated.metrics == alone.metrics


async def _raises():
    raise RuntimeError("no score")


async def _nan():
    return EnvReply(math.nan)


async def _sleeps():
    await asyncio.sleep(60)


@pytest.mark.parametrize("spoil", [_raises, _nan, _sleeps])
def test_a_sample_that_cannot_be_scored_is_dropped_alone(make_collector, questions, spoil):
    collector = make_collector(SampleNumberEnv(spoil), questions[:2], on_error="drop", timeout_s=0.2)
    rollouts = collector.collect()
    names = rollouts.to_batch(PAD)["idx"]
    dropped = names.index("11+3#1")
    expected = torch.ones(8)
    expected[dropped] = 0
    assert torch.equal(rollouts.to_batch(PAD)["sample_mask"], expected)
    assert rollouts.metrics["dropped_samples"] == 1
    rewards = [float(name.rpartition("#")[2]) for row, name in enumerate(names) if row != dropped]
    assert rollouts.metrics["reward"] == pytest.approx(sum(rewards) / 7)
    advantages = group_normalized(rollouts.rewards, rollouts.group_ids, rollouts.is_valid)
    group = [row for row, name in enumerate(names) if name.startswith("11+3#") and row != dropped]
    assert advantages[dropped] == 0
    assert (
        advantages[group].tolist()
        == group_normalized(
            torch.tensor([0.0, 2.0, 3.0]), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
        ).tolist()
    )


@pytest.mark.parametrize("spoil", [_raises, _nan, _sleeps])
def test_with_on_error_fail_the_sample_is_named(make_collector, questions, spoil):
    collector = make_collector(SampleNumberEnv(spoil), questions[:1], timeout_s=0.2)
    with pytest.raises(EnvironmentFailure, match=r"SampleNumberEnv.*11\+3#1"):
        collector.collect()


def test_refill_replaces_groups_without_signal_and_keeps_the_number_of_rows(make_collector, questions):
    prompts = [Prompt(q.prompt_id, q.messages, {"signal": n % 4 == 0}) for n, q in enumerate(questions)]
    collector = make_collector(SampleNumberEnv(), prompts, prompts_per_step=4, refill_rounds=20)
    rollouts = collector.collect()
    assert len(rollouts.samples) == 16
    assert all(sample.prompt.info["signal"] for sample in rollouts.samples)
    assert rollouts.metrics["groups_with_signal_fraction"] == 1.0
    replaced = rollouts.metrics["groups_without_signal_replaced"]
    assert collector.state_dict()["cursors"] == [4 + replaced]
    assert replaced > 0


def test_refill_that_finds_no_signal_keeps_groups_without_signal(make_collector, questions):
    prompts = [Prompt(q.prompt_id, q.messages, {"signal": False}) for q in questions]
    collector = make_collector(SampleNumberEnv(), prompts, prompts_per_step=3, refill_rounds=1)
    rollouts = collector.collect()
    assert len(rollouts.samples) == 12
    assert rollouts.metrics["groups_without_signal_replaced"] == 3
    assert collector.state_dict()["cursors"] == [6]


def test_equal_seeds_give_equal_rollouts_and_others_do_not(make_collector, arithmetic, questions):
    first, again, other = (
        tokens_of(make_collector(arithmetic, questions, model="embedded-untrained", seed=seed).collect())
        for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_a_restored_state_gives_exactly_the_next_batch(make_collector, arithmetic, questions):
    collector = make_collector(arithmetic, questions)
    collector.collect()
    state = collector.state_dict()
    expected = collector.collect()
    resumed = make_collector(arithmetic, questions)
    resumed.load_state_dict(state)
    found = resumed.collect()
    assert tokens_of(found) == tokens_of(expected)
    assert torch.equal(found.rewards, expected.rewards)


def test_evaluation_does_not_change_training(make_collector, arithmetic, questions):
    plain, evaluated = (make_collector(arithmetic, questions) for _ in range(2))
    plain.collect()
    evaluated.collect()
    held_out = evaluated.evaluate(questions[:3])
    assert [sample.prompt.prompt_id for sample in held_out.samples] == ["11+3", "12+3", "13+3"]
    assert evaluated.state_dict() == plain.state_dict()
    assert tokens_of(evaluated.collect()) == tokens_of(plain.collect())


def test_the_generator_releases_its_memory_before_training_only(make_collector):
    env = GuessingEnv(GuessingConfig(max_number=50, max_turns=5))
    collector = make_collector(env, env.prompts(), max_turns=3)
    collector.evaluate(env.prompts()[:2], batch_size=1)  # the next call is `collect`
    assert set(collector.generator.order) == {"generate"}
    collector.collect()
    *rounds, last = collector.generator.order
    assert last == "release"
    assert set(rounds) == {"generate"}


def test_iterating_collects_step_after_step(make_collector, arithmetic, questions):
    collector, other = (make_collector(arithmetic, questions) for _ in range(2))
    batches = iter(collector)
    assert [tokens_of(next(batches)) for _ in range(2)] == [tokens_of(other.collect()) for _ in range(2)]


def test_rollouts_have_their_policy_version(make_collector, arithmetic, questions):
    collector = make_collector(arithmetic, questions)
    assert collector.collect().policy_version == 0
    collector.update_policy_weights_(version=7)
    assert collector.collect().policy_version == 7


def test_metrics_of_the_environment_do_not_replace_those_of_the_collector(make_collector, questions):
    class Boasting:
        async def step(self, batch):
            return [EnvReply(0.25, metrics={"reward": 100.0, "style": 3.0}) for _ in batch]

    metrics = make_collector(Boasting(), questions).collect().metrics
    assert metrics["style"] == 3.0
    assert metrics["reward"] == 0.25


def test_a_prompt_longer_than_the_context_is_refused_with_its_id_and_both_lengths(
    make_collector, arithmetic, questions
):
    long = Prompt("tale", ({"role": "user", "content": "x" * 600},))
    collector = make_collector(arithmetic, [*questions, long])
    with pytest.raises(DataError, match=r"'tale' has 602 tokens.*context of 512 tokens"):
        collector.check([*questions, long])


def test_a_row_that_is_found_too_long_while_training_is_named_with_the_remedy(make_collector, arithmetic):
    long = Prompt("tale", ({"role": "user", "content": "x" * 600},), place="data.jsonl:7")
    collector = make_collector(arithmetic, [long])
    with pytest.raises(DataError, match=r"'tale' \(data\.jsonl:7\) has 602 tokens.*set data\.max_prompt_tokens=511"):
        collector.collect()


def test_filtered_rows_are_counted(make_collector, arithmetic):
    rows = [{"prompt": f"{n}+3=", "answer": n + 3, "level": n % 2} for n in range(20)]
    dataset = prompt_dataset(DataConfig(where={"level": 1}, validation_fraction=0), seed=0, rows=rows)
    collector = make_collector(arithmetic, dataset, prompts_per_step=10)
    counts = [collector.collect().metrics["filtered_rows"] for _ in range(2)]
    assert min(counts) > 0
    assert sum(counts) == dataset.num_passed - 20


def test_map_fn_calls_the_one_worker(make_collector, arithmetic, questions):
    collector = make_collector(arithmetic, questions)
    assert collector.map_fn("state_dict", [()]) == [{"cursors": [0], "batches": 0}]
    with pytest.raises(ValueError, match="2 tuples for 1 worker"):
        collector.map_fn("state_dict", [(), ()])


def test_shutdown_may_be_called_twice(make_collector, arithmetic, questions):
    collector = make_collector(arithmetic, questions)
    collector.shutdown()
    collector.shutdown()


def test_dumped_samples_are_readable(make_collector, arithmetic, questions):
    rollouts = make_collector(arithmetic, questions).collect()
    samples = rollouts.to_samples()
    assert {len(column) for column in samples.values()} == {8}
    messages, reward = samples["messages"][0], samples["reward"][0]
    question, completion = messages[0]["content"], messages[1]["content"]
    assert reward == float(completion == str(sum(map(int, question.rstrip("=").split("+")))))


def test_only_the_first_samples_are_dumped_with_their_tokens(make_collector, arithmetic, questions, monkeypatch):
    rollouts = make_collector(arithmetic, questions).collect()
    lengths = [sample.num_sampled_tokens for sample in rollouts.samples]
    monkeypatch.setattr("lucidrl.collectors.rollouts.MOST_TOKENS", sum(lengths[:3]))
    with_tokens = ["tokens" in messages[-1] for messages in rollouts.to_samples()["messages"]]
    assert with_tokens == [True] * 3 + [False] * 5


def test_a_completion_ends_at_the_stop_string_of_its_prompt(make_collector):
    class Any:
        async def step(self, batch):
            return [EnvReply(1.0) for _ in batch]

    messages = ({"role": "user", "content": "12+30="},)
    digits = tuple("0123456789")
    prompts = [Prompt("free", messages), Prompt("stopped", messages, stop_strings=digits)]
    rollouts = make_collector(Any(), prompts).evaluate(prompts)
    free, stopped = (sample.log[-1]["content"] for sample in rollouts.samples)
    assert len(free) > 1
    assert stopped == free[0]
