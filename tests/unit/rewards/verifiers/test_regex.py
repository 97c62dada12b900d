import pytest

from tests.unit.rewards.verifiers.scoring import outcome, score


def test_a_match_alone_earns_the_reward_without_an_answer():
    assert score("regex", "<think>a</think>\nb", {}, pattern=r"\A<think>.*</think>") == 1
    assert score("regex", "b", {}, pattern=r"\A<think>.*</think>") == 0


def test_a_group_is_compared_with_the_answer():
    options = {"pattern": r"^Result: *(?P<value>\w+)$", "group": "value"}
    assert score("regex", "Result: no\nResult: yes", {"answer": "yes"}, **options) == 1
    assert score("regex", "Result: no\nResult: yes", {"answer": "yes"}, match="first", **options) == 0
    assert score("regex", "result: YES", {"answer": "yes"}, ignore_case=True, **options) == 1
    assert outcome("regex", "yes", {"answer": "yes"}, **options) == "parse failure"
    assert outcome("regex", "b", {"answer": "a"}, pattern="(a)|b", group=1) == "parse failure"


@pytest.mark.parametrize(("strip", "expected"), [(True, 1), (False, 0)])
def test_white_space_at_the_ends(strip, expected):
    assert score("regex", "=  4 ", {"answer": 4}, pattern="=(.*)", group=1, strip=strip) == expected
