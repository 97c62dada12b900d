"""How generators split prompts, and where they may run."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lucidrl.distributed.workers.place import Place
from lucidrl.errors import ConfigError
from lucidrl.models.generation.config import GenerationConfig
from lucidrl.models.generation.refit import check_device
from lucidrl.models.generation.separate import generator_nodes, prompt_chunks

PROMPTS = [b"a", b"b", b"a", b"c", b"d", b"d", b"e", b"f"]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
def test_chunks_have_every_row_once_and_keep_rows_of_a_prompt_together(most):
    chunks = prompt_chunks(PROMPTS, most)
    assert 1 <= len(chunks) <= most
    assert sorted(row for rows in chunks for row in rows) == list(range(8))
    for prompt in set(PROMPTS):
        rows = {row for row, other in enumerate(PROMPTS) if other == prompt}
        assert any(rows <= set(chunk) for chunk in chunks)


def test_chunks_are_about_equal_and_a_single_chunk_keeps_the_order():
    assert prompt_chunks([bytes([number]) for number in range(12)], 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert prompt_chunks(PROMPTS, 1) == [list(range(8))]
    assert prompt_chunks([], 4) == [[]]
    assert prompt_chunks([b"a"] * 6 + [b"b"], 4) == [[0, 1, 2, 3, 4, 5], [6]]


def test_ipc_needs_a_device_of_the_policy():
    def check(refit: str, device: str) -> None:
        config = GenerationConfig(placement="separate", refit=refit)
        check_device(config, 0, "device", [Place("node", "127.0.0.1", device)])

    check("ipc", "device")
    check("auto", "GPU-1")
    with pytest.raises(ConfigError, match="generator 0 is on device and the policy on GPU-1; set policy"):
        check("ipc", "GPU-1")


def test_generators_that_share_memory_with_the_policy_are_on_its_nodes():
    assert generator_nodes(GenerationConfig(), ["a", "b", "a"]) is None
    for config in (GenerationConfig(refit="ipc"), GenerationConfig(placement="separate", nodes="policy")):
        choice = generator_nodes(config, ["a", "b", "a"])
        assert [choice.allows(node) for node in "abc"] == [True, True, False]
    choice = generator_nodes(GenerationConfig(placement="separate", nodes="other"), ["a", "b"])
    assert [choice.allows(node) for node in "abc"] == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": "other"}, "nodes=other is for separate generators, but placement=policy; set"),
        (
            {"placement": "separate", "nodes": "other", "refit": "ipc"},
            "refit=ipc needs generators on the policy's nodes, which nodes=other excludes",
        ),
    ],
)
def test_contradictory_settings_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        GenerationConfig(**settings)
