"""Rollouts with tools: rows are the tokens that the model saw and sampled, over all turns and after a fork."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lucidrl.algorithms.config import GRPOConfig
from lucidrl.algorithms.grpo import GRPO
from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt
from lucidrl.data.messages import render_prompt
from lucidrl.data.tools import with_tools
from lucidrl.distributed.batched_data_dict import BatchedDataDict
from lucidrl.envs.text.interfaces import EnvReply
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.tools.env import ToolEnv
from tests.unit.data.conftest import CHATML, make_tokenizer
from tests.unit.data.test_tools import STRIPS_REASONING

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'
PAD = 2


class ScriptedGenerator:
    """Writes given completions, one per turn, and records the prompts that it gets."""

    num_restarts, policy_version, refit_gb_per_s = 0, 0, None

    def __init__(self, tokenizer, *completions):
        self._tokenizer, self._completions = tokenizer, list(completions)
        self.prompts = []

    def release_memory(self):
        """It has none."""

    def generate(self, data, greedy=False):
        text = self._completions[len(self.prompts)]
        lengths = data["input_lengths"].tolist()
        rows = [data["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)]
        self.prompts.append(rows)
        sampled = self._tokenizer.encode(text, add_special_tokens=False)
        logprobs = [torch.cat([torch.zeros(length), torch.full((len(sampled),), -0.5)]) for length in lengths]
        pad = torch.nn.utils.rnn.pad_sequence
        whole = [torch.tensor(row + sampled) for row in rows]
        return BatchedDataDict(
            {
                "output_ids": pad(whole, batch_first=True),
                "logprobs": pad(logprobs, batch_first=True),
                "generation_lengths": torch.tensor([len(sampled)] * len(rows)),
                "unpadded_sequence_lengths": torch.tensor([len(row) for row in whole]),
                "truncated": torch.zeros(len(rows), dtype=torch.bool),
                "policy_versions": torch.zeros(len(rows), dtype=torch.int64),
            }
        )


def collected(tokenizer, env, completions, *, samples=2, max_turns=3, context=4000):
    generator = ScriptedGenerator(tokenizer, *completions)
    prompts = [Prompt("p", ({"role": "user", "content": "17*23="},), {"answer": "391"})]
    config = TextCollectorConfig(prompts_per_step=1, samples_per_prompt=samples, max_turns=max_turns)
    runner = EnvRunner(env, timeout_s=60, max_concurrency=2, on_error="fail")
    collector = TextCollector(generator, runner, tokenizer, prompts, config, context_length=context)
    try:
        return collector.collect(), generator
    finally:
        collector.shutdown()


def rows_of(batch):
    return [ids[:length].tolist() for ids, length in zip(batch["input_ids"], batch["input_lengths"], strict=True)]


def sampled_text(tokenizer, batch, row):
    return tokenizer.decode(batch["input_ids"][row][batch["token_mask"][row].bool()])


def text_of(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_a_row_holds_all_turns_and_only_sampled_tokens_count():
    env = ToolEnv(["calculator"], rewards="numeric", max_turns=3)
    tokenizer = with_tools(make_tokenizer(CHATML), env.schemas)
    rollouts, generator = collected(tokenizer, env, [f"{CALL}<|im_end|>", "It is 391.<|im_end|>"])
    batch = rollouts.to_batch(PAD)
    assert rollouts.rewards.tolist() == [1.0, 1.0]
    assert rollouts.metrics["tools/calls"] == 1.0
    assert rollouts.metrics["forked_rows"] == 0.0
    first, second = generator.prompts
    assert rows_of(batch)[0][: len(second[0])] == second[0]  # the second turn continues the tokens of the first
    assert second[0][: len(first[0])] == first[0]
    written = text_of(tokenizer, batch["input_ids"][0][batch["token_mask"][0].bool()].tolist())
    assert written == f"{CALL}<|im_end|>It is 391.<|im_end|>"
    assert "<tool_result>391</tool_result>" in text_of(tokenizer, rows_of(batch)[0])


class Hints:
    """Asks twice; rewards the second completion."""

    async def step(self, batch):
        hint = ({"role": "user", "content": "again"},)
        return [
            EnvReply(1.0 + len(request.sample_id)) if request.turn == 3 else EnvReply(0.0, done=False, messages=hint)
            for request in batch
        ]


@pytest.fixture
def forked():
    tokenizer = make_tokenizer(STRIPS_REASONING)
    texts = ["<think>one</think>1<|im_end|>", "2<|im_end|>", "<think>three</think>3<|im_end|>"]
    rollouts, generator = collected(tokenizer, Hints(), texts)
    return tokenizer, rollouts, generator


def test_a_template_that_removes_reasoning_forks_the_row(forked):
    tokenizer, rollouts, _generator = forked
    assert rollouts.metrics["forked_rows"] == 2.0  # one per sample: the second turn has no reasoning to remove
    assert rollouts.row_samples.tolist() == [0, 0, 1, 1]
    batch = rollouts.to_batch(PAD)
    rows = rows_of(batch)
    first = text_of(tokenizer, rows[0])
    assert first.endswith("<think>one</think>1<|im_end|>")
    second = text_of(tokenizer, rows[1])
    assert "one" not in second
    assert second.endswith("<think>three</think>3<|im_end|>")
    written = [text_of(tokenizer, batch["input_ids"][row][batch["token_mask"][row].bool()].tolist()) for row in (0, 1)]
    assert written == ["<think>one</think>1<|im_end|>", "2<|im_end|><think>three</think>3<|im_end|>"]
    assert batch["idx"] == ["p#0", "p#0", "p#1", "p#1"]


def test_the_model_sees_what_the_template_writes_at_inference(forked):
    tokenizer, _rollouts, generator = forked
    messages = [{"role": "user", "content": "17*23="}]
    for turn, completion in enumerate(["<think>one</think>1", "2"]):
        assert generator.prompts[turn][0] == render_prompt(tokenizer, messages)
        messages += [{"role": "assistant", "content": completion}, {"role": "user", "content": "again"}]
    assert generator.prompts[2][0] == render_prompt(tokenizer, messages)


def test_every_sampled_token_is_trained_once_with_its_logprob(forked):
    _tokenizer, rollouts, _ = forked
    batch = rollouts.to_batch(PAD)
    assert int(batch["token_mask"].sum()) == sum(sample.num_sampled_tokens for sample in rollouts.samples)
    assert torch.equal(batch["generation_logprobs"], -0.5 * batch["token_mask"])


def test_rows_of_a_fork_share_the_advantage_and_fill_whole_global_batches(forked):
    _, rollouts, _ = forked
    rollouts.samples[0].reward = 5.0
    policy = SimpleNamespace(
        policy_version=rollouts.policy_version,
        with_scores=lambda batch, previous, reference: {"prev_logprobs": torch.zeros(batch["input_ids"].shape)},
    )
    grpo = GRPO(GRPOConfig(), loop=None, policy=policy, collector=None, pad_id=PAD, updates_per_epoch=3)
    batch = grpo.prepare(rollouts)
    assert batch.size == 6  # four rows, and two that fill up the last of three global batches
    assert batch["sample_mask"].tolist() == [1.0] * 4 + [0.0] * 2
    advantages = batch["advantages"].tolist()
    assert advantages[0] == advantages[1] > 0 > advantages[2] == advantages[3]


def test_a_rewritten_history_that_does_not_fit_the_context_ends_the_sample():
    tokenizer = make_tokenizer(STRIPS_REASONING)
    rollouts, _ = collected(tokenizer, Hints(), ["<think>one</think>" + "1" * 60 + "<|im_end|>"], context=100)
    assert rollouts.is_truncated.all()
    assert rollouts.row_samples.tolist() == [0, 1]
