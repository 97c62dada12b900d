"""Collectors on the embedded model, with real environments."""

from __future__ import annotations

import pytest
import torch

from lucidrl.collectors.config import TextCollectorConfig
from lucidrl.collectors.text import TextCollector
from lucidrl.data.datasets import Prompt
from lucidrl.envs.text.runner import EnvRunner
from lucidrl.models.embedded import embedded_tokenizer
from lucidrl.models.generation.builtin import BuiltinGenerator
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.loading import load_model
from lucidrl.models.logprobs import LogprobModel


class RecordingGenerator(BuiltinGenerator):
    """Records its inputs and outputs, and the order of its calls."""

    def generate(self, data, greedy=False):
        output = super().generate(data, greedy)
        self.record = [*getattr(self, "record", []), (data, output)]
        self.order = [*getattr(self, "order", []), "generate"]
        return output

    def release_memory(self):
        super().release_memory()
        self.order = [*getattr(self, "order", []), "release"]


@pytest.fixture(scope="session")
def models():
    """The warm model, and one whose completions are noise, special tokens included."""
    return {name: LogprobModel(load_model(name, torch.float32), 1.0) for name in ("embedded", "embedded-untrained")}


@pytest.fixture
def make_collector(models):
    """Makes collectors with a `generator` attribute, and shuts them down."""
    made = []

    def make(env, prompts, *, model="embedded", seed=0, timeout_s=10.0, on_error="fail", context=512, **settings):
        settings = {"prompts_per_step": 2, "samples_per_prompt": 4, **settings}
        tokenizer = embedded_tokenizer()
        generator = RecordingGenerator(models[model], tokenizer, GenerationConfig(max_new_tokens=5))
        runner = EnvRunner(env, timeout_s, max_concurrency=4, on_error=on_error)
        config = TextCollectorConfig(**settings)
        collector = TextCollector(generator, runner, tokenizer, prompts, config, context_length=context, seed=seed)
        made.append(collector)
        collector.generator = generator
        return collector

    yield make
    for collector in made:
        collector.shutdown()


@pytest.fixture
def questions():
    """Eight additions."""
    return [Prompt(f"{n}+3", ({"role": "user", "content": f"{n}+3="},), {"answer": n + 3}) for n in range(11, 19)]
