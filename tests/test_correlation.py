"""Cross-correlation of the clients' logits: against the paper's equation and plain loops, and the figure of it."""

import numpy as np
import pytest
import torch

import fedcli
from fedcli import toy
from fedcli.core.draws import generator
from fedcli.errors import UserError
from fedcli.figures.predictions import correlation_chart
from fedcli.measure import correlation
from fedcli.papers import fccl_plus
from fedcli.registry import find_method
from fedcli.results.run_records import find_records
from fedcli.runs.resume import open_run
from tests.commands import run_command
from tests.plain_loops import modules_of
from tests.tensors import randn

ON_DOMAINS = {
    "dataset": "digit-domains", "protocol": "fccl:digit-domains", "train_examples": 200, "rounds": 1,
    "local_epochs": 1, "backbone": "cnn-small", "device": "cpu",
}  # fmt: skip
PUBLIC = {**ON_DOMAINS, "public_examples": 30}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A method without public images, and one with two seeds, the first of which is not first by name."""
    parent = tmp_path_factory.mktemp("runs")
    fedcli.run("local", out=parent / "a", **ON_DOMAINS)
    fedcli.run("fccl-plus", out=parent / "b", **{**PUBLIC, "seed": 1})
    fedcli.run("fccl-plus", out=parent / "c", **PUBLIC)
    return parent


def test_cross_correlation_is_the_papers_equation():
    logits = 1e9 * randn(9, 4, seed=0)
    mean = 1e9 * randn(9, 4, seed=1)
    logits[:, 2] = 3.0
    expected = fccl_plus.cross_correlation(logits, mean) * 9 / 8  # which divides deviations by n - 1, and the sum by n
    assert (expected[2] == 0).all()
    torch.testing.assert_close(correlation.cross_correlation(logits, mean), expected, rtol=1e-12, atol=1e-12)


def test_the_means_over_clients_by_loops(runs, monkeypatch):
    monkeypatch.setattr(correlation, "MAX_IMAGES", 20)
    run = open_run(runs / "c")
    fed = run.fed
    models = modules_of(run.fed, {client: run.state.clients[client] for client in range(4)})
    measured = correlation.correlations(fed, run.setup.method, run.state, correlation.public_sample(fed))

    def logits_of(pixels):
        """Logits by every client's model; pixels are normalised to [-1, 1]."""
        x = (pixels.float() / 255 - 0.5) / 0.5
        logits = []
        for model in models:
            _, logits_of_model = model.eval()(x)
            logits.append(logits_of_model.detach().double())
        return torch.stack(logits)

    def correlate(logits_of_client, mean):
        """The correlation of each class of the first with each of the second."""
        return np.corrcoef(logits_of_client, mean, rowvar=False)[:10, 10:]

    chosen = generator(0, "correlation").permutation(30)[:20]
    logits = logits_of(fed.public_images[chosen])
    public = sum(correlate(logits_of_client, logits.mean(0)) for logits_of_client in logits) / 4
    np.testing.assert_allclose(measured["public"], public, atol=1e-4)  # float32 networks

    private = np.zeros((10, 10))
    for client, part in enumerate(fed.training):
        chosen = part[generator(0, client, "correlation").permutation(len(part))[:20]]
        logits = logits_of(fed.engine.images[chosen])
        private += correlate(logits[client], logits.mean(0)) / 4
    np.testing.assert_allclose(measured["private"], private, atol=1e-4)


def test_clients_with_one_image_are_left_out_of_the_private_mean():
    """A correlation needs a second image."""
    method = find_method("local")

    def private_mean(sizes):
        _, fed = toy.federation(method, parts=toy.toy_parts(sizes), num_clients=len(sizes))
        public = fed.transform(fed.test_images)
        return correlation.correlations(fed, method, method.init(fed, None), public)["private"]

    assert np.isfinite(private_mean((8, 1, 9))).all()
    with pytest.raises(UserError, match="no client has two"):
        private_mean((1, 1))


def test_a_column_a_setting_of_its_first_seed_and_public_images_are_lent(runs):
    figure = correlation_chart(find_records([runs]))
    panels = figure.axes[:4]
    assert figure.get_suptitle().replace("\n", " ").startswith("Digit-domains, domains, seed 0; reduced: ")

    sample = correlation.public_sample(open_run(runs / "c").fed)  # of the first shown that has any

    def assert_column(panels, folder, name):
        run = open_run(runs / folder)
        expected = correlation.correlations(run.fed, run.setup.method, run.state, sample)
        for axes, (kind, matrix) in zip(panels, expected.items(), strict=True):
            (image,) = axes.images
            assert (image.get_array() == matrix).all()
            diagonal = matrix.trace() / 10
            rest = (matrix.sum() - matrix.trace()) / 90
            assert axes.get_title() == f"{name}\n{kind} images, diagonal {diagonal:.2f}, others {rest:.2f}"

    assert_column(panels[0::2], "a", "Local training only")
    assert_column(panels[1::2], "c", "FCCL+")


def test_runs_that_cannot_be_drawn_are_refused(runs, tmp_path):
    averaged = fedcli.run("fedavg", out=tmp_path / "fedavg", **ON_DOMAINS).path
    with pytest.raises(UserError, match="'fedavg' has no personal models"):
        correlation_chart(find_records([runs, averaged]))
    with pytest.raises(UserError, match="no run has public images"):
        correlation_chart(find_records([runs / "a"]))


@pytest.mark.parametrize("kind", ["correlation", "domains"])
def test_the_command_draws_figures_of_personal_models(kind, runs, tmp_path):
    run_command("plot", "--kind", kind, runs / "b", "--out", tmp_path / "one.svg")
    assert (tmp_path / "one.svg").is_file()
