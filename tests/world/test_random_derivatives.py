"""Random programs of messages have the derivatives of the same function on one process. Many more: make soak."""

import derivatives
import pytest

SIZE = derivatives.harness.WORLD.size
# Ranks share two cores, and each mode is compiled.
FEW, MODES = 5 if SIZE <= 2 else 3, 4


@pytest.mark.calculus
def test_random_derivatives():
    done = derivatives.check(range(1_000_000, 1_000_000 + FEW), most=MODES)
    assert done["programs"] == FEW
    assert 0 < done["long"] < done["messages"]


def test_the_same_program_is_drawn_everywhere_and_always():
    again = [derivatives.Program.drawn(5, SIZE) for _ in range(2)]
    assert again[0] == again[1]
    assert derivatives.harness.CONTROL.allgather(str(again[0])) == [str(again[0])] * SIZE


def test_a_wrong_derivative_is_found(monkeypatch):
    """What is sent is doubled where ranks communicate, and not where one process does it all."""
    part = derivatives.Message(0, 0, SIZE - 1, 0, "Isend", True, False, False, (0.1, 0.3, 0.2, 0.4))
    program = derivatives.Program(0, "eager", 1, False, (part,))
    comm = derivatives.harness.communicator("world")
    assert derivatives.differs(program, comm, ["value", "reverse"]) == ""
    send_side, sent = derivatives._send_side, derivatives.sent

    def twice(*args):
        monkeypatch.setattr(derivatives, "sent", lambda x, part: 2 * sent(x, part))
        try:
            return send_side(*args)
        finally:
            monkeypatch.setattr(derivatives, "sent", sent)

    monkeypatch.setattr(derivatives, "_send_side", twice)
    text = derivatives.differs(program, comm, ["reverse"])
    assert ("reverse: " in text) == (comm.rank in (0, SIZE - 1))
