"""Random programs give what NumPy gives. Many more of them: make soak."""

import programs

SIZE = programs.harness.WORLD.size
# Ranks share two cores.
FEW = 24 if SIZE <= 2 else 12


def test_random_programs():
    done = programs.check(range(1_000_000, 1_000_000 + FEW))
    assert done["programs"] == FEW
    assert all(done[way] for way in programs.WAYS)  # each was drawn


def test_the_same_program_is_drawn_everywhere_and_always():
    again = [programs.Program.drawn(5) for _ in range(2)]
    assert again[0] == again[1]
    assert programs.harness.CONTROL.allgather(str(again[0])) == [str(again[0])] * SIZE


def test_a_wrong_result_is_found(monkeypatch):
    """Programs whose reductions get one number too much differ from NumPy's, on every rank that has it."""
    taken_back = programs.taken_back_jitted
    monkeypatch.setattr(programs, "taken_back_jitted", lambda x, y: taken_back(x, y).at[0].add(1))
    step = programs.Operate(0, programs.HERE[0], "world", "int32", halves=False)
    assert "is not" in programs.Program(0, "eager", (step,)).differs()
