"""The launcher and the harness themselves: what every other test on several ranks relies on."""

import harness
import pytest
from hypothesis import given
from hypothesis import strategies as st


def test_communicators_have_the_ranks_they_say(comm):
    world = harness.WORLD
    members = comm.allgather(world.rank)
    assert members[comm.Get_rank()] == world.rank
    assert comm.Get_size() == len(set(members))


def test_reversed_is_reversed():
    comm = harness.communicator("reversed")
    assert comm.Get_rank() == harness.WORLD.size - 1 - harness.WORLD.rank


def test_agree_fails_everywhere_with_one_text():
    last = harness.WORLD.size - 1
    with pytest.raises(AssertionError, match=f"on 1 of {last + 1} ranks:\nrank {last}: mine"):
        harness.agree(harness.WORLD.rank != last, "mine")


@given(st.lists(st.integers()))
def test_hypothesis_draws_in_step(numbers):
    harness.agree(harness.CONTROL.bcast(numbers) == numbers, f"drew {numbers}")
