"""A small model trained with JAX, without torch: ``python examples/jax_train.py [URL]``. Needs ``pip install jax``.

``wds.NumpyLoader`` decodes on threads and gives numpy arrays; ``jax.device_put`` with a sharding over all devices
splits each batch among them.
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sampledata import CLASSES, write_pictures

import wds_async as wds

BATCH = 24


def loss_of(weights, images, labels):
    """Return the cross entropy of a linear model of the mean colours."""
    colours = images.reshape(len(images), -1, 3).mean(1) / 255
    scores = jax.nn.log_softmax(colours @ weights["w"] + weights["b"])
    return -scores[jnp.arange(len(labels)), labels].mean()


@jax.jit
def step(weights, images, labels):
    """Return the loss, and the weights after a step of gradient descent."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, images, labels)
    return loss, jax.tree.map(lambda weight, gradient: weight - 2.0 * gradient, weights, gradients)


def main(url):
    """Four epochs."""
    dataset = (
        wds.WebDataset(url, shardshuffle="epoch", seed=0).shuffle(200, seed=0).decode("rgb8").to_tuple("jpg", "cls")
    )
    loader = wds.NumpyLoader(dataset, BATCH, threads=2, drop_last=True)
    devices = jax.devices()[: next(n for n in range(len(jax.devices()), 0, -1) if BATCH % n == 0)]
    split = NamedSharding(Mesh(devices, "batch"), PartitionSpec("batch"))
    weights = {"w": jnp.zeros((3, CLASSES)), "b": jnp.zeros(CLASSES)}
    for epoch in range(4):
        for images, labels in loader:
            loss, weights = step(weights, jax.device_put(images, split), jax.device_put(labels, split))
        print(f"epoch {epoch}: loss {loss:.3f} on {len(devices)} device(s)", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else write_pictures(folder))
