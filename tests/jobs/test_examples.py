"""The examples give the same answer on any number of ranks, and that answer is right.

All comparisons are in double precision, where a wrong weight or a missing message stands out from rounding by many
orders of magnitude.
"""

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from launch import Result, launch

EXAMPLES = Path(__file__).parents[2] / "examples"
EPS = np.finfo(float).eps
LIMIT = 120  # seconds a job

# A test may start two jobs, its own and that on one rank, or a program in three forms.
pytestmark = pytest.mark.timeout(3 * LIMIT + 30)


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extra `examples`: {', '.join(missing)}")


def run(program: list[str], ranks: int) -> Result:
    done = launch(program, ranks, LIMIT, env={"JAX_ENABLE_X64": "1", "MPLBACKEND": "agg"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def run_code(code: str, ranks: int) -> Result:
    """Run code that may import the examples."""
    return run(["-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}"], ranks)


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@cache
def losses(ranks: int) -> list[list[float]]:
    """The losses of 20 training steps, as each rank has them."""
    done = run_code(
        "import digits, json; from jaxcomm import JaxComm; from mpi4py import MPI\n"
        "print(json.dumps(digits.train(JaxComm(MPI.COMM_WORLD), steps=20)[0]))",
        ranks,
    )
    return [json.loads(rank.stdout) for rank in done.ranks]


@needs("sklearn", "tqdm")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_losses_do_not_depend_on_the_number_of_ranks(ranks):
    first, *others = losses(ranks)
    assert all(other == first for other in others)
    assert first[-1] < first[0] / 2
    # The loss and each gradient are sums over 1437 images, which the ranks add up in another order: that changes them
    # by at most 1437 EPS times the sum of the terms' sizes. Each of 20 steps adds as much to the difference of the
    # parameters, and as long as training converges, momentum alone amplifies that: by 1 / (1 - 0.9).
    np.testing.assert_allclose(first, losses(1)[0], rtol=1437 * EPS * 20 * 10)


@needs("sklearn", "tqdm", "matplotlib")
def test_digits_learns_and_leaves_a_picture(tmp_path):
    picture = tmp_path / "digits.png"
    done = run([str(EXAMPLES / "digits.py"), "--steps", "60", "--output", str(picture)], ranks=2)
    (accuracy,) = re.findall(r"([\d.]+)% \(test\)", done.ranks[0].stdout)
    assert float(accuracy) > 90
    assert str(picture) in done.ranks[0].stdout
    assert done.ranks[1].stdout + done.ranks[1].stderr == ""
    assert is_png(picture)


@pytest.fixture(scope="module")
def heights(tmp_path_factory):
    """The height of the water after 60 steps, on a grid that no number of ranks from 2 to 4 divides."""

    @cache
    def heights(periodic: str, ranks: int) -> np.ndarray:
        output = tmp_path_factory.mktemp("water") / "eta.npy"
        options = ["--nx=37", "--ny=29", "--steps=60", f"--output={output}"]
        run([str(EXAMPLES / "shallow_water.py"), *options, *([f"--periodic={periodic}"] if periodic else [])], ranks)
        return np.load(output)

    return heights


@pytest.mark.parametrize(("ranks", "periodic"), [(2, ""), (3, ""), (3, "xy"), (4, ""), (4, "xy")])
def test_shallow_water_does_not_depend_on_the_number_of_ranks(ranks, periodic, heights):
    # The cells' arithmetic is the same, but the compiler may round it otherwise in blocks of another shape: some ten
    # roundings in each of 60 * 3 stages. Heights are below 1 m, and the stable scheme does not amplify differences.
    np.testing.assert_allclose(heights(periodic, ranks), heights(periodic, 1), rtol=0, atol=60 * 3 * 10 * EPS)


@pytest.mark.parametrize("periodic", ["", "xy"])
def test_shallow_water_keeps_its_volume(periodic, heights):
    y, x = np.ogrid[:29, :37]
    hump = np.exp(-((x - 0.3 * 37) ** 2 + (y - 0.4 * 29) ** 2) / 10**2)
    after = heights(periodic, 1)
    assert np.abs(after - hump).max() > 0.1
    # What leaves a cell enters its neighbour: only the 180 roundings of each of the cells' heights can add up.
    assert abs(after.sum() - hump.sum()) < hump.size * 180 * EPS


@needs("matplotlib")
def test_shallow_water_leaves_a_picture(tmp_path):
    picture = tmp_path / "water.png"
    done = run([str(EXAMPLES / "shallow_water.py"), "--nx=30", "--ny=20", "--steps=5", f"--output={picture}"], ranks=3)
    assert str(picture) in done.ranks[0].stdout
    assert is_png(picture)


def test_shallow_water_refuses_blocks_without_cells():
    done = launch([str(EXAMPLES / "shallow_water.py"), "--ny=2"], 3, LIMIT)
    assert done.returncode not in (0, 124)
    assert "too many" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_conjugate_gradients_agree_with_a_dense_solution(ranks):
    done = run_code(
        "import conjugate_gradients as cg, jax, json, numpy as np\n"
        "from jaxcomm import JaxComm; from mpi4py import MPI\n"
        "comm = JaxComm(MPI.COMM_WORLD)\n"
        "f = np.random.default_rng(1).standard_normal((11, 14))\n"
        "solve = jax.jit(lambda b: cg.conjugate_gradients(comm, lambda u: cg.laplacian(comm, u), b, 1e-10)[0])\n"
        "u = solve(f[cg.my_rows(comm, 11)])\n"
        "print(json.dumps(np.asarray(u).tolist()))",
        ranks,
    )
    u = np.concatenate([json.loads(rank.stdout) for rank in done.ranks]).ravel()
    assert u.shape == (11 * 14,)

    f = np.random.default_rng(1).standard_normal((11, 14)).ravel()
    second = [2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1) for n in (11, 14)]
    matrix = np.kron(second[0], np.eye(14)) + np.kron(np.eye(11), second[1])
    # u - exact is the inverse matrix times the residual, whose norm is at most 1e-10 of f's.
    bound = 1e-10 * np.linalg.norm(f) / np.linalg.eigvalsh(matrix)[0]
    assert np.linalg.norm(u - np.linalg.solve(matrix, f)) <= bound


def test_conjugate_gradients_as_a_program():
    done = run([str(EXAMPLES / "conjugate_gradients.py"), "--nx=31", "--ny=20"], ranks=3)
    (difference,) = re.findall(r"direct solution: (\S+)", done.ranks[0].stdout)
    assert float(difference) < 1e-8
    assert done.ranks[1].stdout == done.ranks[2].stdout == ""


# Programs for mpi4py, ported

# What rank 0 prints, and how far from NumPy's answer rounding may lead.
PORTED = {
    "matrix_vector": (r"eigenvalue (\S+), relative error (\S+)", 64 * EPS),  # sums of 24 terms, in both
    "heat": (r"left (\S+), difference (\S+)", 100 * 10 * EPS),  # ten roundings in each of 100 steps, of values below 1
    "workers": (r"about (\S+), difference (\S+)", 1000 * EPS * 4 / 40),  # sums of 1000 terms, which are at most 4 / 40
}


def numbers(name: str, done: Result) -> tuple[str, float]:
    """What rank 0 prints: the answer, and how far it is from NumPy's."""
    assert [rank.stdout for rank in done.ranks[1:]] == [""] * (len(done.ranks) - 1)
    answer, difference = re.search(PORTED[name][0], done.ranks[0].stdout).groups()
    return answer, float(difference)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", PORTED)
def test_ported_programs(name, ranks):
    """With one line changed they do what they did before; with the loop in jit they give the same answer."""
    path = EXAMPLES / "porting" / f"{name}.py"
    line, made = re.search(
        r"^(comm = JaxComm\(MPI.COMM_WORLD\)  # was: (.*))$", path.read_text(), re.MULTILINE
    ).groups()
    before = path.read_text().replace(line, made).replace("from jaxcomm import JaxComm\n", "")
    assert "jax" not in before.split('"""')[2]
    results = [run(["-c", before], ranks), run([str(path)], ranks), run([str(path.with_stem(f"{name}_jit"))], ranks)]
    assert results[0].ranks[0].stdout == results[1].ranks[0].stdout
    (answer, _), *others = [numbers(name, done) for done in results]
    for other, difference in others:
        assert other == answer
        assert difference <= PORTED[name][1]
