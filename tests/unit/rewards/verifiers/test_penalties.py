import pytest

from lucidrl.rewards.interfaces import Completion
from lucidrl.rewards.verifiers import make_verifier
from tests.unit.rewards.verifiers.scoring import score


@pytest.mark.parametrize(("num_tokens", "reward"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (500, -1)])
def test_the_soft_overlong_penalty_falls_over_the_buffer(num_tokens, reward):
    verifier = make_verifier("overlong", {"max_tokens": 100, "buffer_tokens": 20})
    assert verifier(Completion("", num_tokens), {}) == pytest.approx(reward)


@pytest.mark.parametrize(("num_tokens", "reward"), [(0, 0), (10, 0), (15, -0.5), (20, -1), (30, -1)])
def test_the_length_penalty_is_linear(num_tokens, reward):
    verifier = make_verifier("length", {"max_tokens": 20, "free_tokens": 10})
    assert verifier(Completion("", num_tokens), {}) == pytest.approx(reward)


def test_repetitions_are_penalized_by_their_fraction():
    assert score("repetition", "one two three four five", {}) == 0
    assert score("repetition", "one two", {}) == 0
    assert score("repetition", "a b c a b c", {}) == pytest.approx(-1 / 4)
    assert score("repetition", "no " * 1000, {}) == pytest.approx(-1, abs=0.01)
    assert score("repetition", "ababab", {}, unit="characters", ngram_size=2) == pytest.approx(2 / 5 - 1)
