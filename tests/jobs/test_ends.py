"""Jobs whose last rank is killed, interrupted or raises; all combinations are in tests/soak/ends.py."""

import ends
import pytest

LIMIT = 60

pytestmark = pytest.mark.timeout(LIMIT + 30)

CASES = [
    ("SIGKILL", "running"),
    ("SIGTERM", "compiling"),
    ("KeyboardInterrupt", "tracing"),
    ("an exception", "exit"),
]


@pytest.mark.parametrize(("fault", "phase"), CASES, ids=[f"{fault}, {phase}" for fault, phase in CASES])
def test_the_job_ends_with_an_error_within_seconds(fault, phase):
    found = ends.end(fault, phase, ranks=3, limit=LIMIT)
    print(found.stderr)
    assert found.seconds is not None
    assert found.returncode not in (0, 124)
    assert found.seconds < 15
    if fault == "an exception":
        assert found.stderr.count("ArithmeticError: on purpose") == 1
        assert "uncaught exception on rank 2: ending the job" in found.stderr
