"""Options of runs that take a second."""

FEW_DIGITS = {"dataset": "digits", "train_examples": 120, "device": "cpu"}

# Four rounds of two of four clients, with a checkpoint after each.
SHORT_RUN = {
    **FEW_DIGITS, "num_clients": 4, "cohort_size": 2, "rounds": 4, "local_epochs": 1, "batch_size": 16,
    "checkpoint_every": 1,
}  # fmt: skip
# Three rounds of as many epochs as the protocol has.
THREE_ROUNDS = {
    **FEW_DIGITS, "protocol": "fedfm:digits", "num_clients": 4, "cohort_size": 2, "rounds": 3, "batch_size": 16,
    "partition": "iid",
}  # fmt: skip
# Two rounds, with the clients of a protocol.
TWO_ROUNDS = {"dataset": "digits", "train_examples": 120, "rounds": 2, "local_epochs": 1}
# Two rounds of two clients with half as many digits.
TWO_CLIENTS = {
    "dataset": "digits", "protocol": "fedfm:digits", "train_examples": 60, "num_clients": 2, "cohort_size": 2,
    "rounds": 2, "device": "cpu", "partition": "iid",
}  # fmt: skip
# One round, for any data set.
ONE_ROUND = {"train_examples": 200, "num_clients": 4, "partition": "iid", "rounds": 1, "device": "cpu"}

# One epoch of few steps, for toy data.
FEW_STEPS = {"batch_size": 8, "local_epochs": 1}
