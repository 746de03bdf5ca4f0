"""What papers say, where it decides in the rows of more than one peer.

Readings are those that the card of a method numbers.
"""

FEDAVG_WEIGHTS = "FedAvg, Algorithm 1: weights n_k / n."
FEDAVGM_VELOCITY = "FedAvgM: w <- w - v with v <- beta v + Delta."
REDDI_SECOND_MOMENT = "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2 (Reading 2)."
SCAFFOLD_MEANS = "SCAFFOLD, lines 16 and 17: both plain; here both by examples (Reading 5)."
SCAFFOLD_FIRST_CONTROLS = "SCAFFOLD, Section 4: they begin at 0, or as gradients at the first model."
MOON_MODE = "MOON is silent; the authors' code evaluates both (Reading 4)."
MOON_FIRST_ROUND = "MOON is silent; the authors' code has no term in the first round (Reading 3)."
FEDPROTO_EPOCHS = "FedProto, Eq. 3: of the client's data, without a word of epochs."
