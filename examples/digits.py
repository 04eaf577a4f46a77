"""Train a small neural network to read handwritten digits, with the images spread over all ranks.

    mpiexec -n 2 python examples/digits.py

Each rank holds a share of the images and computes the gradient of the loss summed over its share. An Allreduce adds up
the ranks' sums inside the compiled training step, so all ranks take the same step: the one that a single process
holding all images would take, apart from rounding. Needs scikit-learn, matplotlib and tqdm: the extra "examples".
"""

import argparse

import jax
import jax.numpy as jnp
from mpi4py import MPI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from jaxcomm import JaxComm


def load_share(comm):
    """Return this rank's share of the training images and labels, and of the test images and labels."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.2, stratify=labels, random_state=0)
    # Every size-th sample, starting at our rank. The shares may differ by one sample.
    x_train, x_test, y_train, y_test = (jnp.asarray(a[comm.rank :: comm.size]) for a in split)
    return (x_train, y_train), (x_test, y_test)


def initial_parameters(comm, sizes=(64, 64, 10), seed=0):
    """Return one (weights, bias) pair per layer, drawn by rank 0 and sent to all others."""
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    params = [
        (jax.random.normal(key, (n_in, n_out)) * (2 / n_in) ** 0.5, jnp.zeros(n_out))
        for key, n_in, n_out in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]
    return comm.Bcast(params, root=0)


def logits(params, x):
    *hidden, (weights, bias) = params
    for w, b in hidden:
        x = jax.nn.relu(x @ w + b)
    return x @ weights + bias


def summed_loss(params, x, y):
    """Return the cross-entropy, summed over the images. (Means over uneven shares could not simply be averaged.)"""
    log_probabilities = jax.nn.log_softmax(logits(params, x))
    return -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).sum()


def train(comm, steps=300, rate=0.2, momentum=0.9, every=10):
    """Train by gradient descent with momentum on all images at once.

    Returns the mean loss before each step, and every few steps the accuracy: a list of (step, training, test).
    """
    train_share, test_share = load_share(comm)
    n_train, n_test = (comm.allreduce(len(y)) for _, y in (train_share, test_share))

    @jax.jit
    def step(params, velocity, x, y):
        loss, grads = jax.value_and_grad(summed_loss)(params, x, y)
        # From sums over this rank's images to means over all ranks' images.
        loss, grads = jax.tree.map(lambda a: a / n_train, comm.Allreduce((loss, grads), op=MPI.SUM))
        velocity = jax.tree.map(lambda v, g: momentum * v - rate * g, velocity, grads)
        return jax.tree.map(jnp.add, params, velocity), velocity, loss

    @jax.jit
    def count_correct(params, x, y):
        return comm.Allreduce((logits(params, x).argmax(axis=1) == y).sum(), op=MPI.SUM)

    params = initial_parameters(comm)
    velocity = jax.tree.map(jnp.zeros_like, params)
    losses, accuracies = [], []
    for i in tqdm(range(steps), desc="training", unit="step", disable=comm.rank != 0):
        params, velocity, loss = step(params, velocity, *train_share)
        losses.append(float(loss))
        if (i + 1) % every == 0 or i + 1 == steps:
            correct = count_correct(params, *train_share) / n_train, count_correct(params, *test_share) / n_test
            accuracies.append((i + 1, *map(float, correct)))
    return losses, accuracies


def save_picture(losses, accuracies, path):
    import matplotlib.pyplot as plt

    steps, training, test = zip(*accuracies, strict=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.semilogy(losses)
    left.set(xlabel="step", ylabel="mean cross-entropy", title="Training loss")
    right.plot(steps, training, label=f"training ({training[-1]:.1%})")
    right.plot(steps, test, label=f"test ({test[-1]:.1%})")
    right.set(xlabel="step", ylabel="fraction read correctly", title="Accuracy")
    right.legend(loc="lower right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="Data-parallel training on handwritten digits.")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate (default: %(default)s)")
    parser.add_argument("--output", default="digits.png", help="where the picture goes (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")

    comm = JaxComm(MPI.COMM_WORLD)
    if comm.rank == 0:
        print(f"Training a network to read handwritten digits: {options.steps} steps on {comm.size} ranks.", flush=True)

    losses, accuracies = train(comm, options.steps, options.rate)

    if comm.rank == 0:
        _, training, test = accuracies[-1]
        print(f"Loss {losses[0]:.3f} -> {losses[-1]:.4f}; accuracy {training:.1%} (training), {test:.1%} (test).")
        save_picture(losses, accuracies, options.output)
        print(f"The loss and accuracy curves are in {options.output}.")


if __name__ == "__main__":
    main()
