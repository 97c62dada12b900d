"""The rules of asynchronous collection, on simulated time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidrl.collectors.groups import Ticket
from lucidrl.collectors.scheduler import Scheduler
from lucidrl.errors import RefitError
from tests.unit.collectors.simulation import Simulation, rules


def scheduler(**rules_) -> Scheduler:
    made = Scheduler(rules(**rules_), lambda: 0.0)
    made.generator_started(0)
    return made


def fill(made: Scheduler) -> None:
    """Start all groups that may start."""
    for _ in range(made.num_wanted()):
        made.add_group(f"prompt {made.next_number}")
    made.starts()


def finish(made: Scheduler, *groups: int, version: int | None = None) -> None:
    for group in groups:
        for index, sample in enumerate(made.groups[group].samples):
            ticket = Ticket(group, index, sample.attempt)
            assert made.generated(ticket, made.version if version is None else version)
            made.scored(ticket, "finished")


def numbers(taken) -> list[int] | None:
    return None if taken is None else [group.number for group in taken[0]]


BIG = {"rows_per_generator": 10_000}


def test_groups_start_only_if_a_step_may_train_on_them_in_time():
    made = scheduler(prompts_per_step=4, max_staleness=2, **BIG)
    assert made.num_wanted() == 12
    fill(made)
    assert made.num_wanted() == 0
    finish(made, 0, 1, 2, 3)
    assert numbers(made.take()) == [0, 1, 2, 3]
    assert made.num_wanted() == 0, "while step 1 trains, a new group would be trained in step 4, by version 3"
    made.set_version(1)
    assert made.num_wanted() == 4


def test_the_last_steps_start_no_group_that_none_would_train_on():
    made = scheduler(max_staleness=3, max_steps=2, **BIG)
    fill(made)
    assert len(made.groups) == 8
    finish(made, 0, 1, 2, 3)
    made.take()
    made.set_version(1)
    assert made.num_wanted() == 0


def test_a_step_takes_younger_groups_instead_of_waiting_for_one_that_may_be_trained_later():
    made = scheduler(**BIG)
    fill(made)
    finish(made, 1, 3, 5, 7)
    assert numbers(made.take()) == [1, 3, 5, 7]


def test_a_step_waits_for_the_groups_that_would_be_too_old_for_the_next_one():
    made = scheduler(**BIG)
    fill(made)
    finish(made, 1, 3, 5, 7)
    made.take()
    made.set_version(1)
    fill(made)
    finish(made, 8, 9, 10, 11)
    assert made.take() is None
    assert "group 0" in made.longest()
    finish(made, 0, 2, 4, 6)
    assert numbers(made.take()) == [0, 2, 4, 6]


def test_it_waits_in_time_even_if_several_later_steps_have_space():
    made = scheduler(prompts_per_step=1, max_staleness=2, **BIG)
    fill(made)  # 0, 1 and 2 expire in step 3
    finish(made, 2)
    assert numbers(made.take()) == [2]
    made.set_version(1)
    fill(made)
    finish(made, 3)
    assert made.take() is None, "of 0 and 1, step 3 has space for one"
    finish(made, 1)
    assert numbers(made.take()) == [1]


@pytest.mark.parametrize(("stale", "count"), [("drop", "dropped"), ("regenerate", "regenerated")])
def test_other_settings_do_not_wait_and_what_is_too_old_is_dropped_or_begins_again(stale, count):
    made = scheduler(stale_samples=stale, **BIG)
    fill(made)
    finish(made, 1, 3, 5, 7)
    made.take()
    made.set_version(1)
    fill(made)
    finish(made, 8, 9, 10, 11)
    assert numbers(made.take()) == [8, 9, 10, 11]
    changes = made.set_version(2)
    assert len(changes.aborted) == 16
    assert made.counts[count] == 16
    if stale == "drop":
        assert [group.number for group in changes.removed] == [0, 2, 4, 6]
        assert made.dropped_prompts == [(n, f"prompt {n}") for n in (0, 2, 4, 6)]
    else:
        assert len(changes.restarted) == 16
        made.starts()
        assert {made.groups[0].oldest, made.groups[6].oldest} == {2}


def test_results_of_aborted_attempts_are_ignored():
    made = scheduler(stale_samples="regenerate", **BIG)
    fill(made)
    finish(made, 1, 3, 5, 7)
    made.take()
    made.set_version(2)
    assert not made.generated(Ticket(0, 0, 0), oldest=0)
    made.starts()
    assert made.generated(Ticket(0, 0, 1), oldest=2)
    assert not made.is_scoring(Ticket(0, 0, 0))
    assert made.is_scoring(Ticket(0, 0, 1))


def test_a_completion_that_is_older_than_the_weights_of_its_generator_is_an_error():
    made = scheduler(**BIG)
    fill(made)
    finish(made, 0, 1, 2, 3)
    made.take()
    made.set_version(1)
    fill(made)
    assert made.generated(Ticket(4, 0, 0), oldest=0), "it was requested before the refit"
    with pytest.raises(RefitError, match="generator 0 has version 1 of the weights, but completed a sample with ver"):
        made.generated(Ticket(8, 0, 0), oldest=0)


def test_a_group_is_trained_without_its_tail_if_the_settings_say_so():
    made = scheduler(group_fraction=0.5, prompts_per_step=1, **BIG)
    fill(made)
    for index in (1, 2):
        assert made.take() is None
        made.generated(Ticket(0, index, 0), oldest=0)
        made.scored(Ticket(0, index, 0), "finished")
    [group], changes = made.take()
    assert [sample.phase for sample in group.samples] == ["dropped", "finished", "finished", "dropped"]
    assert [ticket.sample for ticket, _ in changes.aborted] == [0, 3]
    assert made.counts["dropped"] == 2


def test_samples_of_a_lost_generator_wait_again_at_their_turn():
    made = scheduler(prompts_per_step=1, max_staleness=1, rows_per_generator=8)
    made.generator_started(1)
    fill(made)
    assert {one.generator for group in made.groups.values() for one in group.samples} == {0, 1}
    first = next(index for index, one in enumerate(made.groups[0].samples) if one.generator == 0)
    assert made.generated(Ticket(0, first, 0), oldest=0)
    made.scored(Ticket(0, first, 0), "next turn")
    [again] = made.starts()
    assert (again.turn, again.generator) == (2, 0), "the generator that has the earlier turn"
    made.generator_lost(0)
    starts = {start.ticket: start for start in made.starts()}
    assert starts[Ticket(0, first, 1)].turn == 2
    assert all(start.generator == 1 for start in starts.values())
    assert made.groups[0].samples[first].oldest == 0


def test_samples_of_a_group_share_a_generator_until_others_have_much_less_to_do():
    made = scheduler(prompts_per_step=4, samples_per_prompt=4, max_staleness=0, rows_per_generator=100)
    made.generator_started(1)
    fill(made)
    for group in made.groups.values():
        assert len({sample.generator for sample in group.samples}) == 1
    assert [len(work) for work in made._work.values()] == [8, 8]


def test_open_samples_are_bounded():
    simulation = Simulation(rules(max_open=5, max_staleness=2), max_turns=3).run(20)
    assert simulation.most_open == 5


def test_a_state_survives_json_and_what_was_in_flight_waits_again():
    made = scheduler(**BIG)
    fill(made)
    finish(made, 2, 3, 4, 5)
    made.take()
    finish(made, 1, 6)
    state = json.loads(json.dumps(made.state_dict()))
    resumed = Scheduler(rules(**BIG), lambda: 0.0)
    resumed.load_state_dict(state)
    resumed.generator_started(7)
    assert sorted(resumed.groups) == [0, 1, 6, 7]
    assert {start.ticket.group for start in resumed.starts()} == {0, 7}
    assert resumed.next_number == 8
    finish(resumed, 0, 7)
    resumed.set_version(1)
    assert numbers(resumed.take()) == [0, 1, 6, 7]


def check_ledger(simulation: Simulation) -> None:
    """Every group that was drawn is trained once, removed once, or still in flight."""
    trained = [number for step in simulation.trained for number in step]
    everything = sorted([*trained, *simulation.removed, *simulation.scheduler.groups])
    assert everything == list(range(simulation.scheduler.next_number))
    bound = simulation.rules.config.max_staleness
    assert max(simulation.staleness, default=0) <= bound
    assert simulation.most_groups <= simulation.rules.prompts_per_step * (bound + 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stale=st.sampled_from(["wait", "drop", "regenerate"]),
    staleness=st.integers(0, 4),
    fraction=st.sampled_from([0.3, 0.5, 1.0]),
    max_open=st.sampled_from([None, 1, 3, 20]),
    lifetime_s=st.sampled_from([None, 0.5, 5.0]),
    generators=st.integers(1, 6),
    turns=st.integers(1, 3),
    restarts=st.booleans(),
    env_drops=st.sampled_from([0.0, 0.1]),
    train_s=st.sampled_from([0.01, 1.0, 10.0]),
)
def test_whatever_happens_no_prompt_is_lost_repeated_or_too_old(
    seed, stale, staleness, fraction, max_open, lifetime_s, generators, turns, restarts, env_drops, train_s
):
    made = rules(
        max_staleness=staleness,
        stale_samples=stale,
        group_fraction=fraction,
        max_open=max_open,
        restarts_in_flight=restarts,
        rows_per_generator=3,
    )
    # A tail no longer than the generators' lives, or nothing ever finishes.
    longest_s = 1.0 if lifetime_s == 0.5 else 20.0
    simulation = Simulation(
        made,
        seed,
        num_generators=generators,
        lifetime_s=lifetime_s,
        longest_s=longest_s,
        env_drops=env_drops,
        max_turns=turns,
        train_s=train_s,
    ).run(12)
    assert len(simulation.trained) == 12
    check_ledger(simulation)


def test_waiting_drops_and_regenerates_nothing_and_leaves_no_prompt_behind():
    simulation = Simulation(rules(max_staleness=2, max_steps=50), tail=0.8, train_s=0.2).run(50)
    assert dict(simulation.scheduler.counts) == {"dropped": 0, "regenerated": 0}
    assert sorted(number for step in simulation.trained for number in step) == list(range(200))
    assert not simulation.scheduler.groups


def test_hundreds_of_generators_that_come_and_go_for_hours():
    made = rules(prompts_per_step=16, samples_per_prompt=8, max_staleness=2, rows_per_generator=4)
    simulation = Simulation(made, num_generators=150, lifetime_s=6.0, train_s=120.0, longest_s=8.0)
    simulation.run(10)
    settled = size_of(simulation.scheduler)
    simulation.run(60)
    assert simulation.now > 2 * 3600
    assert simulation.num_deaths > 50_000
    check_ledger(simulation)
    assert size_of(simulation.scheduler) < 2 * settled


def size_of(scheduler: Scheduler) -> int:
    """Number of entries in everything that the scheduler holds."""
    held = [scheduler.groups, scheduler._fresh, scheduler._continuing, scheduler._work, scheduler.dropped_prompts]
    return sum(map(len, held)) + sum(map(len, scheduler._work.values()))


@pytest.mark.parametrize("stale", ["wait", "drop", "regenerate"])
def test_a_run_goes_on_under_a_smaller_bound_and_loses_no_prompt(stale):
    first = Simulation(rules(max_staleness=4, stale_samples=stale, rows_per_generator=2)).run(10)
    first._note(first.scheduler.set_version(10))
    state = json.loads(json.dumps(first.scheduler.state_dict()))
    second = Simulation(rules(max_staleness=1, stale_samples=stale, rows_per_generator=2), seed=1)
    second.scheduler.load_state_dict(state)
    second.versions = dict.fromkeys(second.versions, 10)
    second._note(second.scheduler.set_version(10))
    second.run(20)
    assert max(second.staleness) <= 1
    numbers = [number for step in first.trained + second.trained for number in step] + first.removed + second.removed
    assert len(numbers) == len(set(numbers))
    assert set(range(max(numbers))) - set(numbers) <= set(second.scheduler.groups)
