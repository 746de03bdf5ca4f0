"""Cross-correlation of the clients' logits: against the paper's equation and slow loops, and the figure of it."""

import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedcli
from fedcli.cli import app as cli
from fedcli.core.evaluation import models
from fedcli.errors import UserError
from fedcli.figures import matrices as correlation
from fedcli.figures import plots
from fedcli.papers import fccl_plus
from fedcli.registry import find_method
from fedcli.runs.records import read_record, write_record
from fedcli.runs.run import open_run, restore
from tests import laws

TINY = {
    "dataset": "digit-domains", "protocol": "fccl:digit-domains", "train_examples": 200, "rounds": 1,
    "local_epochs": 1, "device": "cpu",
}  # fmt: skip
PUBLIC = {**TINY, "public_examples": 30}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A method without public images, and one with two seeds, the first of which is not first by name."""
    parent = tmp_path_factory.mktemp("runs")
    fedcli.run("local", out=parent / "a", **TINY)
    fedcli.run("fccl-plus", out=parent / "b", **{**PUBLIC, "seed": 1})
    fedcli.run("fccl-plus", out=parent / "c", **PUBLIC)
    return parent


def logits(seed, count=9, classes=4):
    return torch.tensor(np.random.default_rng(seed).normal(size=(count, classes)))


def by_hand(own, mean):
    """Correlations by NumPy, with n - 1 in the deviations and n under the sum."""
    count, classes = own.shape
    both = np.corrcoef(np.concatenate([own, mean], 1).T)
    return both[:classes, classes:] * (count - 1) / count


# The matrix


def test_it_is_the_papers_equation_and_a_correlation():
    own, mean = logits(0), logits(1)
    found = correlation.cross_correlation(own, mean)
    torch.testing.assert_close(found, fccl_plus.cross_correlation(own, mean), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found, by_hand(own, mean), rtol=1e-4)  # 1e-5 is added to the deviations
    assert not torch.allclose(found, found.T, atol=0.1)  # the client's classes are the rows


def test_a_class_whose_logits_never_vary_has_no_correlation():
    own, mean = logits(0), logits(1)
    own[:, 2] = 3.0
    found = correlation.cross_correlation(own, mean)
    assert found[2].tolist() == [0] * 4
    torch.testing.assert_close(found, fccl_plus.cross_correlation(own, mean), rtol=1e-12, atol=1e-12)


def test_models_are_in_evaluation_mode():
    data = {"data": laws.toy_dataset(num_train=12, channels=3), "parts": laws.toy_parts((12,)), "num_clients": 1}
    setup, fed = laws.federation("local", backbone="resnet10-3x3", **data)
    state = laws.simulate(setup, fed, 1)  # so that the running statistics are not those of a batch
    clients = [model for _, model in models(fed, setup.method, state, range(fed.num_clients))]
    network, *model = clients[0]
    found = correlation.score(clients, fed.transform(fed.engine.images))
    torch.testing.assert_close(found[0], fed.predict(*model, np.arange(12), network)[1], rtol=1e-9, atol=1e-9)


def test_the_means_over_clients_by_loops(runs, monkeypatch):
    monkeypatch.setattr(correlation, "EXAMPLES", 20)
    folder, record = runs / "c", read_record(runs / "c")
    method = find_method("fccl-plus")
    _, fed = restore(record, method)
    state = open_run(folder).state.clients
    assert sorted(state) == [0, 1, 2, 3]
    public, private = correlation.correlations(folder, torch.zeros(0))

    def scores(images, pixels):
        """Logits by every client's model from its checkpoint; pixels are normalised to [-1, 1]."""
        found = []
        for client in range(4):
            module = fed.networks[fed.architecture[client]].module.eval()
            params, buffers = state[client][:2]
            module.load_state_dict({**params, **buffers})
            found.append(module((images[pixels] / 255 - 0.5) / 0.5)[1].detach().double())
        return torch.stack(found)

    order = correlation.generator(0, "correlation").permutation(30)[:20]
    found = scores(fed.public_images.float(), order)
    expected = sum(fccl_plus.cross_correlation(own, found.mean(0)) for own in found) / 4
    np.testing.assert_allclose(public, expected, atol=1e-4)  # float32 networks
    each = []
    for client, part in enumerate(fed.training):
        assert len(part) > 20
        chosen = part[correlation.generator(0, client, "correlation").permutation(len(part))[:20]]
        found = scores(fed.engine.images.float(), chosen)
        each.append(fccl_plus.cross_correlation(found[client], found.mean(0)))
    np.testing.assert_allclose(private, sum(each) / 4, atol=1e-4)


def test_clients_with_one_image_are_left_out_of_the_private_mean():
    _, fed = laws.federation("local", parts=laws.toy_parts((8, 1, 9)), num_clients=3)
    clients = [model for _, model in models(fed, find_method("local"), find_method("local").init(fed, None), range(3))]
    expected = []
    for client in (0, 2):
        found = correlation.score(clients, correlation.private_sample(fed, client))
        expected.append(correlation.cross_correlation(found[client], found.mean(0)))
    torch.testing.assert_close(correlation.on_private(clients, fed), sum(expected) / 2)
    fed.training = [part[:1] for part in fed.training]
    with pytest.raises(UserError, match="no client has two training images"):
        correlation.on_private(clients, fed)


# The figure


def test_a_row_a_setting_of_its_first_seed_and_public_images_are_lent(runs, tmp_path):
    runs = shutil.copytree(runs, tmp_path / "runs")  # the matrices go into the records
    figure = correlation.correlation_chart([runs])
    panels = figure.axes[:4]
    title = figure.get_suptitle().replace("\n", " ")
    assert title.startswith("Digit-domains, domains, seed 0; reduced: ")
    assert [axes.get_ylabel().split(" ")[0] for axes in panels] == ["Local", "", "FCCL+", ""]
    _, lender = restore(read_record(runs / "c"), find_method("fccl-plus"))  # the first shown with public images
    sample = correlation.public_sample(lender)
    expected = [matrix for folder in ("a", "c") for matrix in correlation.correlations(runs / folder, sample)]
    for axes, matrix, kind in zip(panels, expected, ["Public", "Private"] * 2, strict=True):
        (image,) = axes.images
        assert (image.get_array() == matrix).all()
        assert image.get_clim() == (-1, 1)
        assert image.cmap(image.norm(0.0)) == pytest.approx((1, 1, 1, 1), abs=0.04)  # white
        diagonal = matrix.trace() / 10
        rest = (matrix.sum() - matrix.trace()) / 90
        assert axes.get_title() == f"{kind} images\ndiagonal {diagonal:.2f}, others {rest:.2f}"
    for file in runs.rglob("checkpoint*"):
        file.unlink()
    again = correlation.correlation_chart([runs])
    for axes, before in zip(again.axes[:4], panels, strict=True):
        assert (axes.images[0].get_array() == before.images[0].get_array()).all()


def test_runs_that_cannot_be_drawn_are_refused(runs, tmp_path):
    averaged = fedcli.run("fedavg", out=tmp_path / "fedavg", **{**TINY, "backbone": "cnn-small"}).path
    other = fedcli.run(
        "local", out=tmp_path / "local", **{**TINY, "dataset": "digits", "protocol": "fedfm:digits"}
    ).path
    broken = shutil.copytree(runs / "c", tmp_path / "broken")
    for file in broken.glob("checkpoint*"):
        file.unlink()
    for paths, message in (
        ([runs, averaged], "'fedavg' has no personal models"),
        ([runs, other], "of one data set"),
        ([runs / "a"], "no run has public images"),
        ([broken], "checkpoint of .* is missing"),
    ):
        with pytest.raises(UserError, match=message):
            plots.write(tmp_path / "out", correlation.correlation_chart, paths)
    assert not (tmp_path / "out.png").exists()


def test_a_checkpoint_of_another_round_is_refused(runs, tmp_path):
    folder = shutil.copytree(runs / "c", tmp_path / "run")
    record = read_record(folder)
    write_record(folder, {**record, "summary": {**record["summary"], "params_sha256": "0" * 64}})
    with pytest.raises(UserError, match="does not hold the run's last model"):
        plots.write(tmp_path / "out", correlation.correlation_chart, [folder])


@pytest.mark.parametrize("kind", ["correlation", "domains"])
def test_the_command_draws_figures_of_personal_models(kind, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["plot", "--kind", kind, str(runs / "b")])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{kind}.png and {kind}.pdf\n"
