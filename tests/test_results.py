"""What results/ shows is what its records say."""

import json
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest
from scipy.special import stdtrit

from fedcli import figures
from fedcli.figures import features
from fedcli.registry import find_method, find_table
from fedcli.results import claims, comparison, pages, tables
from fedcli.results.metrics import find_metric, lead
from fedcli.runs.records import outdated, quiet

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
NO_NUMBERS = r"(?sm)^#[^\n]*|`[^`]*`|\]\([^)]*\)|\{\{.*?\}\}|(Table|Figs?\.|Figure|Eq\.|Dirichlet)\s[\d.]+"
SETTINGS = ("10", "20", "50")  # of a setting's name, and the rounds that a mean is of
BETWEEN_BACKTICKS = {  # numbers of settings, by study
    "fccl-digits-real-4-base": "40 300",
    "fccl-digits-real-4-resnets": "0.53",  # tested with FCCL+
    "fedfa-fmnist-c2-momentum": "0.5",
    "fedfa-fmnist-c2-phases": "2021",
    "fedfa-fmnist-iid": "0.1 0.5 85",
    "fedfa-fmnist-validation": "100 500 2021",
    "fedfa-fmnist-validation-settings": "100 192 2021",
}
TABLE_8 = {  # a column of FedFA's Table 8 of which a study quotes rounds
    "fedfa-fmnist-c2": "FMNIST #C=2",
    "fedfa-fmnist-a0.1": "FMNIST alpha=0.1",
    "fedfa-fmnist-a0.1-draws": "FMNIST alpha=0.1",
    "fedfa-fmnist-a0.5": "FMNIST alpha=0.5",
}
STUDIES = sorted(path.parent for path in RESULTS.glob("records/*/intro.md"))


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_committed_page_equals_its_records(study):
    page = (RESULTS / f"{study.name}.md").read_text(encoding="utf-8")
    assert page == pages.study_page(study), "run 'make tables'"


def shown():
    """The figures that pages of studies show: their study and kind by path."""
    texts = (file.read_text(encoding="utf-8") for file in RESULTS.glob("*.md"))
    return {path: drawn for text in texts for path, drawn in pages.figures(text).items()}


def test_every_figure_of_a_page_is_one_that_make_tables_draws_and_no_other_stands_there():
    pictures = {file.relative_to(RESULTS) for file in RESULTS.glob("figures/*.*")}
    assert pictures == set(shown())
    written = [file for file in RESULTS.rglob("*.md") if "records" not in file.parts]
    for file in (*written, ROOT / "README.md"):
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            path = (file.parent / target).resolve().relative_to(RESULTS)
            made = path in shown() or path.as_posix() == "board/board.png"
            assert made, f"{file.name} shows {target}, which 'make tables' does not draw from what is committed"
    recipe = re.search(r"^tables:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    assert [line.removeprefix("\t$(BIN)/") for line in recipe.splitlines()[:3]] == [
        "fedcli pages results", "python results/board/board.py --page", "python results/speed/peers/peers.py page",
    ]  # fmt: skip


@pytest.mark.parametrize(("study", "kind"), sorted(shown().values()))
def test_the_data_of_every_figure_are_committed(study, kind, monkeypatch, tmp_path):
    bare = tmp_path / study  # what is kept of a run in the repository, and nothing else
    shutil.copytree(RESULTS / "records" / study, bare, ignore=shutil.ignore_patterns("checkpoint*", "*.png", "*.pdf"))
    monkeypatch.setattr(features, "embed", lambda points: points[:, :2])  # t-SNE takes seconds
    chart = figures.find_chart(kind)
    assert chart.draw(tables.find_records([bare]) if chart.needs == "records" else [bare]).axes


def test_a_large_number_in_the_prose_of_a_study_is_read_and_not_typed():
    typed = {}
    for file in (*RESULTS.glob("records/*/intro.md"), *RESULTS.glob("papers/notes/*.md")):
        text = re.sub(NO_NUMBERS, "", file.read_text(encoding="utf-8"))
        found = re.findall(r"(?<![\w-])\d[\d,.]*\d(?!\w)", text)
        if found := [number for number in found if number not in SETTINGS]:
            typed[str(file)] = found
    assert typed == {}, "write them as fedcli/results/prose.py says"


def test_a_number_between_backticks_is_a_setting_or_computed_here_from_what_is_committed():
    known = {study: set(numbers.split()) for study, numbers in BETWEEN_BACKTICKS.items()} | computed()
    for file in (*RESULTS.glob("records/*/intro.md"), *RESULTS.glob("papers/notes/*.md")):
        spans = re.findall(r"`([^`]+)`", re.sub(r"(?s)\{\{.*?\}\}", "", file.read_text(encoding="utf-8")))
        whole = {span for span in spans if re.fullmatch(r"[+-]?\d[\d,]*(\.\d+)?", span)}
        parts = {part for span in {*spans} - whole for part in re.findall(r"(?<![\w.:=(])(?<![a-z]-)\d+\.\d+", span)}
        assert (whole | parts) - known.get(file.parent.name, set()) == set(), file


def computed():
    """By study, what stands between backticks on its page and is no setting."""
    records = RESULTS / "records"
    notebook = json.loads((records / "fedfa-fmnist-c2" / "notebook.json").read_text())
    fmnist, cifar10 = notebook["fmnist"], notebook["cifar10"]
    of_authors = {f"{value:.2f}" for value in fmnist.values() if isinstance(value, float)}
    of_authors |= {f"{one['FedAvg'] - one['MOON']:.2f}" for one in (fmnist, cifar10)}
    of_authors |= {f"{fmnist['FedFA'] - fmnist['FedAvg']:+.1f}"}
    of_chance = {"3", "95"}
    for first, others in (("fedavg", "seeds"), ("fedavg-other-pairs", "pairs")):
        folders = [records / "fedfa-fmnist-validation" / first, records / "fedfa-fmnist-validation-chance" / others]
        ends = of_one_more(find_metric("last").values(tables.find_records(folders)))
        of_chance |= {f"{end:.1f}" for end in ends}
    tuning = [json.loads(file.read_text()) for file in records.glob("fedfa-fmnist-c2-tuned/*/tuned.json")]
    tuned = {str(number) for one in tuning for number in (one["seed"], one["rounds"], len(one["trials"]))}
    tuned |= {f"{value:g}" for one in tuning for values in one["grid"].values() for value in values}
    rounds = {column: {*map(str, printed_rounds(column).values())} for column in TABLE_8.values()}
    of_table_8 = {study: rounds[column] for study, column in TABLE_8.items()}
    of_table_8["fedfa-fmnist-c2"] |= of_authors | {"2023"}
    return {**of_table_8, "fedfa-fmnist-validation-chance": of_chance, "fedfa-fmnist-c2-tuned": tuned}


def printed_rounds(column):
    """After how many rounds the methods reach a target, as Table 8 prints it."""
    cells = comparison.printed(find_table("fedfa:8")).items()
    return {row: cell["rounds_to_target"] for (row, of), cell in cells if of == column and "rounds_to_target" in cell}


def of_one_more(values):
    """Where one more value lies in 95 of 100 cases, by Student's t."""
    half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) * (1 + 1 / len(values)) ** 0.5
    return fmean(values) - half, fmean(values) + half


@pytest.mark.parametrize(
    ("study", "words"),
    [
        ("fedfa-fmnist-c2", "the paper prints `{FedProc}` and `{MOON}`."),
        ("fedfa-fmnist-c2", "it prints `{FedAvg}` for both."),
        ("fedfa-fmnist-c2", "it prints `{FedProx}` for both."),
        ("fedfa-fmnist-c2", "FedDyn reaches it after {{}}, where it prints `{FedDyn}`,"),
        ("fedfa-fmnist-a0.1", "the paper prints `{FedProc}` for FedProc and `{FedAvg}` for FedAvg."),
        ("fedfa-fmnist-a0.1", "the paper prints `{FedAvg}` for both."),
        ("fedfa-fmnist-a0.1", "the paper prints `{FedDyn}` for both."),
        ("fedfa-fmnist-a0.1", "FedFA needs {{}} rounds here and {FedFA} there."),
        ("fedfa-fmnist-a0.1-draws", "the `{FedAvg}` rounds that the paper prints."),
        (
            "fedfa-fmnist-a0.5",
            "The paper prints `{FedAvg}`, `{FedProx}`, `{FedDyn}`, `{FedFA}`, `{MOON}` and `{FedProc}`,",
        ),
    ],
)
def test_what_is_quoted_of_table_8_is_printed_there(study, words):
    text = (RESULTS / "records" / study / "intro.md").read_text(encoding="utf-8")
    plain = " ".join(re.sub(r"(?s)\{\{.*?\}\}", "{}", text).split())
    assert words.format_map(printed_rounds(TABLE_8[study])) in plain


def test_the_rounds_of_table_8_stand_beside_ours_in_the_same_round_and_the_next():
    text = (RESULTS / "records" / "fedfa-fmnist-iid" / "intro.md").read_text(encoding="utf-8")
    cells = r'\{\{ printed fedfa:8 "(.+?)" "(.+?)" \}\} \| \{\{ at:(\d+)/200 \w+ \}\} \| \{\{ at:(\d+)/200 \w+ \}\}'
    rows = re.findall(r"\| (\d+) \| " + cells, text)
    assert len(rows) == 6
    for number, row, column, same, following in rows:
        assert int(number) == printed_rounds(column)[row] == int(same) == int(following) - 1


def test_the_tuned_methods_had_as_many_trials_as_the_page_says():
    folder = RESULTS / "records" / "fedfa-fmnist-c2-tuned"
    trials = {file.parent.name: len(json.loads(file.read_text())["trials"]) for file in folder.glob("*/tuned.json")}
    assert (trials["fedprox"], trials["feddyn"]) == (trials["moon"], trials["fedfa"])
    said = "FedAvg had `{fedavg}` trials, FedProx and MOON `{moon}`, FedDyn and FedFA `{fedfa}`, one each"
    assert said.format_map(trials) in " ".join((folder / "intro.md").read_text(encoding="utf-8").split())


def test_local_training_of_300_epochs_has_so_many():
    (epochs,) = {
        record["config"]["rounds"] * record["config"]["local_epochs"]
        for method in ("local", "fccl-plus-fntd-alone")
        for record in tables.find_records([RESULTS / "records" / "fccl-digits-real-4-resnets" / method])
    }
    assert epochs == 300


def test_by_their_classifiers_fedsa_and_fedproto_are_within_a_point_of_training_alone():
    means = {
        (runs, name): fmean(
            find_metric(name).values(tables.find_records([RESULTS / "records" / "fedsa-cifar10-device" / runs]))
        )
        for runs, name in (("local", "selected"), ("fedsa", "classifier"), ("fedproto", "classifier"))
    }
    assert max(means.values()) - min(means.values()) < 1


def test_in_full_fedproto_is_behind_by_its_prototypes_alone_and_a_gpu_agrees_with_a_cpu():
    records = RESULTS / "records"

    def rounds_of(study, method, name):
        found = tables.find_records([records / study / method])
        return {one["seed"]: [entry[name] for entry in one["rounds"]] for one in found}

    fifths = {}  # of the rounds, by method, the means over seeds
    for method in ("fedsa", "fedproto"):
        runs = rounds_of("fedsa-cifar10-device-full", method, "classifier_accuracy").values()
        fifths[method] = [fmean(fmean(run[at : at + 200]) for run in runs) for at in range(0, 1000, 200)]
    behind = [theirs < ours for ours, theirs in zip(fifths["fedsa"], fifths["fedproto"], strict=True)]
    assert behind == [True, False, False, False, False]
    for method in ("fedsa", "fedproto"):
        both = [rounds_of(f"fedsa-cifar10-device{kind}", method, "test_accuracy") for kind in ("", "-full")]
        assert both[0].keys() == both[1].keys()
        assert all(abs(max(both[0][seed]) - max(both[1][seed][:200])) < 0.001 for seed in both[0])


def test_clients_of_the_experiment_of_f_2_have_the_images_that_the_page_says():
    folder = RESULTS / "records" / "fedfa-fmnist-validation"
    (skewed,) = tables.find_records([folder / "fedavg"])
    (even,) = tables.find_records([folder / "fedavg-iid"])
    assert all(sorted(counts)[-3:] == [0, 500, 500] for counts in skewed["partition"]["class_counts"])
    assert {sum(counts) for counts in even["partition"]["class_counts"]} == {1000}  # ten classes


def test_there_are_results():
    assert STUDIES


def test_every_study_has_a_short_answer_that_does_not_begin_with_what_only_its_question_says():
    for study in pages.find_studies(RESULTS / "records"):
        assert 40 < len(study.answer) < 400, study.name
        assert not re.match(r"(Yes|No|So|Hardly)[,:.]|(It|They|Not)\b", study.answer), study.name


@pytest.mark.parametrize(
    ("study", "metric", "ours", "theirs", "count"),
    [
        ("fccl-digits-real-4", "selected", "fccl", "local", 2),
        ("fccl-digits-real-4", "selected", "fedmd", "local", 2),
        ("fccl-digits-real-4-base", "selected", "../fccl-digits-real-4-resnets/local", "local", 3),
        ("fccl-digits-real-4-resnets", "selected", "fccl-plus", "fccl-plus-without-fntd", 3),
        ("fccl-digits-real-4-resnets", "selected", "local", "fccl-plus-fccm-alone", 3),
        ("fccl-digits-real-4-resnets", "selected", "local", "fccl-plus-fisl-alone", 3),
        ("fccl-digits-real-4-resnets", "selected", "local", "fedmd", 3),
        ("fccl-digits-real-4-resnets", "intra", "fccl-plus-fntd-alone", "local", 3),
        ("fedcme-fmnist-a0.5-k50-m10", "last", "fedcme", "fedavg", 3),
        ("fedcme-fmnist-a0.5-k50-m10", "mean-of-last:10", "fedcme", "fedavg", 3),
        ("fedsa-cifar10-device", "selected", "fedsa", "fedproto", 3),
        ("fedsa-cifar10-device-full", "selected", "fedsa", "fedproto", 3),
    ],
)
def test_what_is_said_of_every_seed_is_so(study, metric, ours, theirs, count):
    by_seed = [
        {
            one["seed"]: find_metric(metric).value(one)
            for one in tables.find_records([RESULTS / "records" / study / runs])
        }
        for runs in (ours, theirs)
    ]
    assert by_seed[0].keys() == by_seed[1].keys()
    assert len(by_seed[0]) == count
    assert all(by_seed[0][seed] > by_seed[1][seed] for seed in by_seed[0])


@pytest.mark.parametrize(
    ("study", "ours", "theirs", "ahead", "behind"),
    [("fccl-digits-real-4", "fccl-plus", "local", 1, 1), ("fmnist-dirichlet-0.1", "fedfm-weight-1", "fedavg", 2, 1)],
)
def test_what_is_said_of_some_seeds_is_so(study, ours, theirs, ahead, behind):
    sides = [tables.find_records([RESULTS / "records" / study / runs]) for runs in (ours, theirs)]
    values = [{one["seed"]: find_metric("selected").value(one) for one in side} for side in sides]
    leads = [values[0][seed] - values[1][seed] for seed in values[0]]
    assert (sum(lead > 0 for lead in leads), sum(lead < 0 for lead in leads)) == (ahead, behind)


@pytest.mark.parametrize(
    ("study", "metric", "ours", "theirs", "beyond"),
    [
        ("fccl-digits-real-4-base", "selected", "../fccl-digits-real-4-resnets/fccl", "local", True),
        ("fccl-digits-real-4-resnets", "selected", "fccl-plus", "local", False),
        ("fccl-digits-real-4-resnets", "selected", "fccl", "local", False),
        ("fccl-digits-real-4-resnets", "selected", "fccl-plus", "fccl-plus-without-fntd", False),
        ("fedcme-fmnist-a0.5-k50-m10", "last", "fedcme", "fedavg", False),
        ("fedcme-fmnist-a0.5-k50-m10", "mean-of-last:10", "fedcme", "fedavg", True),
        ("fedfm-cifar10-resnet18", "quality:nmi", "fedfm", "fedavg", True),
        ("fedfm-cifar10-resnet18", "quality:silhouette", "fedfm", "fedavg", False),
        ("fedfm-cifar10-resnet18", "selected", "fedfm", "fedavg", False),
        ("fedsa-cifar10-device", "selected", "fedsa", "local", False),
        ("fedsa-cifar10-device-full", "selected", "fedsa", "fedproto", True),
        ("fedsa-cifar10-device-full", "classifier", "fedsa", "fedproto", False),
        ("fmnist-dirichlet-0.1", "selected", "fedfm-weight-1", "fedavg", False),
    ],
)
def test_what_an_answer_says_of_chance_is_so(study, metric, ours, theirs, beyond):
    sides = [tables.find_records([RESULTS / "records" / study / runs]) for runs in (ours, theirs)]
    found = lead(find_metric(metric), *sides)
    assert (found.low > 0 or found.high < 0) == beyond


def test_among_nine_methods_fedavgm_is_the_most_accurate_and_fedfm_keeps_the_classes_apart_best():
    folders = [one for one in (RESULTS / "records" / "fmnist-nine-methods").iterdir() if one.is_dir()]

    def best(name):
        values = {one.name: find_metric(name).values(tables.find_records([one])) for one in folders}
        means = {method: fmean(found) for method, found in values.items() if len(found) == 2}
        return max(means, key=means.get)

    assert (best("selected"), best("quality:nmi"), best("quality:silhouette")) == ("fedavgm", "fedfm", "fedfm")


def test_the_page_says_which_runs_are_of_an_earlier_version_of_their_methods_file():
    old = {
        (folder.relative_to(RESULTS / "records").parts[0], method)
        for method, pairs in claims.by_method([RESULTS / "records"]).items() for folder, record in pairs
        if outdated(record, find_method(method))
    }  # fmt: skip
    assert old == {("fmnist-nine-methods", "scaffold")}
    assert "SCAFFOLD's runs are of an earlier version of its file" in (RESULTS / "fmnist-nine-methods.md").read_text()


def test_what_a_client_of_fedfm_and_scaffold_holds_is_the_papers_to_a_thousand():
    paper = comparison.printed(find_table("fedfm:III"))
    for row in ("FedFM", "SCAFFOLD"):
        (record,) = tables.find_records([RESULTS / "records" / "fedfm-memory" / row.lower()])
        held, there = record["cost"]["memory_floats"], paper[row, "CIFAR-10 memory_1e3_floats"]
        assert abs(held - 1000 * there["mean"]) < 1000, there


def test_the_pages_of_the_papers_equal_their_files_and_the_records(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDCLI_DATA", str(tmp_path))  # no data set is there
    monkeypatch.chdir(ROOT)
    made = pages.pages(Path("results"))
    for name, text in made.items():
        assert (RESULTS / name).read_text(encoding="utf-8") == text, f"run 'make tables': {name}"
    written = {path.name for path in made if path.parent.name == "papers"}
    assert {path.name for path in (RESULTS / "papers").glob("*.md")} == written
    assert "fedfa:label-skew" in made[Path("README.md")]
    assert pages.BEGIN in made[Path("..") / "README.md"]  # the project's first page quotes them
    monkeypatch.chdir(tmp_path)
    assert pages.pages(RESULTS) == made  # wherever it is called from


def test_the_links_of_the_pages_lead_somewhere():
    for file in (*RESULTS.glob("*.md"), *RESULTS.glob("papers/*.md")):
        for target in re.findall(r"\]\(([^)#:\s]+)\)", file.read_text(encoding="utf-8")):
            assert (file.parent / target).exists(), (file.name, target)
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [study.name for study in STUDIES if f"({study.name}.md)" not in listed] == []


def test_the_first_page_names_the_tables_that_have_been_run_in_full():
    whole = pages.run_in_full(claims.by_method([RESULTS / "records"]))
    assert [table.name for table in whole] == ["fedfa:5", "fedfa:6", "fedfa:7"]
    left_out = {
        (table.name, row)
        for table in whole
        for row, column in comparison.printed(table)
        if (row, column) not in {(cell.row, cell.column) for cell in table.cells}
    }
    assert left_out == {("fedfa:7", 'FedFA "ideal" init (anchors of a finished run)')}
    told = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = "FedFA's Tables 5, 6 and 7 have been run in full, but for the row of Table 7 that starts from the anchors of"
    assert f"{said} a finished run; no others have." in told


def test_hours_left_go_by_quiet_runs():
    timed = tables.find_records([RESULTS / "records" / "timed"])
    assert len(timed) == 14
    assert all(quiet(one) and one["status"] == "finished" for one in timed)
    told = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert f"data set and network on {timed[0]['hardware']['name']} (cpu); none like the other runs has been" in told


def test_one_cell_is_redone_by_a_command_of_the_first_page_of_results():
    (command,) = re.findall(r"^\$ fedcli verify (.+)$", (RESULTS / "README.md").read_text(encoding="utf-8"), re.M)
    (record,) = tables.find_records([ROOT / command])
    assert record["status"] == "finished"
