"""Deals a data set by the flag of a partition, and reads the pixels of what was dealt."""

from types import SimpleNamespace

from fedcli.core.partition import from_flag

# What `divide` reads of a run's options.
DIVISION_OPTIONS = SimpleNamespace(local_test=0.25, validation=0.0, partition_seed=0, drop_last=False, batch_size=1)


def deal_parts(dataset, flag, num_clients, seed=0):
    """Returns the positions of the examples of each client under a partition."""
    deal = from_flag(flag)
    return deal(dataset.y_train, num_clients, seed, None, None, dataset.place_train)


def pixels(dataset, positions):
    """Returns the bytes of the training images at these positions."""
    return [image.numpy().tobytes() for image in dataset.x_train[positions]]
