"""Whether the actors of a collector find room on the nodes of a cluster."""

from __future__ import annotations

import pytest

from lucidrl.collectors.ray_options import hold_all


@pytest.mark.parametrize(
    ("nodes", "asked", "is_room"),
    [
        ([2], [2], True),
        ([1, 1], [2], False),  # free in all, but on no node
        ([3, 1], [2, 2], False),
        ([2, 2], [2, 2], True),
        ([3, 3], [1, 1, 2, 2], True),  # the small ones first would leave 1 and 3
        ([1], [0.1] * 10, True),
        ([1], [0.1] * 11, False),
        ([], [], True),
        ([], [1], False),
    ],
)
def test_every_actor_has_to_fit_on_one_node(nodes, asked, is_room):
    assert hold_all([{"CPU": amount} for amount in nodes], [{"CPU": amount} for amount in asked]) is is_room


def test_what_only_some_nodes_have_is_left_to_those_that_ask_for_it():
    nodes = [{"CPU": 4.0, "GPU": 8.0}, {"CPU": 1.0}]
    on_gpus = [{"CPU": 0.5, "GPU": 1.0}] * 8
    assert hold_all(nodes, [{"CPU": 1.0}, *on_gpus])
    assert not hold_all(nodes, [{"CPU": 1.0}, *on_gpus, {"CPU": 0.5}])
    assert nodes[0] == {"CPU": 4.0, "GPU": 8.0}  # nothing was taken


def test_actors_that_ask_for_nothing_need_a_node_only():
    assert hold_all([{"CPU": 1.0}], [{}] * 100)
