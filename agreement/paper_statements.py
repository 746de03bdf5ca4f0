"""What papers say, where it decides in rows of more than one peer.

Readings are those that the card of a method numbers.
"""

FEDAVG_WEIGHTS = "FedAvg, Algorithm 1: weights n_k / n."
FEDAVGM_VELOCITY = "FedAvgM: w <- w - v with v <- beta v + Delta."
REDDI_SECOND_MOMENT = "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2 (Reading 2)."
REDDI_SECOND_MOMENT_UNCORRECTED = "Algorithm 2 of Reddi et al.: v_{-1} >= tau^2, and no correction (Readings 2 and 3)."
SCAFFOLD_MEANS = "SCAFFOLD, lines 16 and 17: both plain; here both by examples (Reading 5)."
SCAFFOLD_MEANS_BY_OPTION = "SCAFFOLD, lines 16 and 17: plain, for which fedcli has --weighting uniform (Reading 5)."
SCAFFOLD_FIRST_CONTROLS = "SCAFFOLD, Section 4: they begin at 0, or as gradients at the first model."
FEDDYN_PENALTY = "FedDyn, Algorithm 1: alpha / 2 ||w - w_g||^2."
FEDDYN_SQUARED_NORM = "FedDyn, Algorithm 1: alpha / 2 times the squared norm."
MOON_MODE = "MOON is silent; the authors' code evaluates both (Reading 4)."
MOON_FIRST_ROUND = "MOON is silent; the authors' code has no term in the first round (Reading 3)."
FEDPROTO_EPOCHS = "FedProto, Eq. 3: of the client's data, without a word of epochs."
APFL_PERSONAL_MODEL = "APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept."
APFL_PERSONAL_MODEL_AND_ALPHA = (
    "APFL, Algorithm 1: v moves by the gradient at the mixture, and is kept; alpha may be fixed."
)
