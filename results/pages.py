"""The pages of `results/`: one a study, one a paper from its file's card and the records, and a first one.

    python results/pages.py [DIR]          # write all pages in DIR, this folder by default, and their figures
    python results/pages.py [DIR] --check  # write nothing, and say which pages are not those that would be written

They are made from the repository alone, so they are the same on every machine.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from first_page import make_first_page
from paper_page import Paper, make_paper_page, plan_papers
from studies import name_groups, read_study
from study_page import EVERY_RUN, Figure, list_charts, make_study_page

from fedcli import registry
from fedcli.figures import find_chart
from fedcli.figures.saving import write_page_figure
from fedcli.files import write_atomically
from fedcli.results import claim_tables, claims, plans, verdicts
from fedcli.results.render import render, render_github_table, replace_between_marks

HERE = Path(__file__).parent


@dataclass(frozen=True)
class MadeFile:
    """A file that is made: a page with the figures that it shows, or the table of verdicts.

    Attributes:
        path: The path relative to the folder `results`, as `README.md`, or `../README.md` for the file beside it.
        text: What the file holds.
        figures: The figures that the page shows.
    """

    path: Path
    text: str
    figures: tuple[Figure, ...] = ()


def make_files(results: Path) -> list[MadeFile]:
    """Makes all pages and files of `results`, a folder with `records/<study>` and `papers/notes/<paper>.md`.

    A `README.md` beside the folder gets the number of claims between two marks, and a folder `papers` beside it the
    verdicts that are installed with the package.
    """
    records = results / "records"
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    answers = claims.answer_claims(registry.claims(), [records])
    papers = plan_papers(records)

    made = []
    for study in studies:
        figures = tuple(Figure(study, kind) for kind in list_charts(study))
        made.append(MadeFile(Path(f"{study.name}.md"), make_study_page(study), figures))
    for paper in papers:
        shown = replace(paper, tables=[shorten_folders_of_plan(plan, results) for plan in paper.tables])
        page = make_paper_page(shown, studies, read_notes(paper.name, results))
        made.append(MadeFile(Path("papers") / f"{paper.name}.md", page))
    made.append(MadeFile(Path("README.md"), make_first_page(records, studies, answers, papers)))

    readme = results.parent / "README.md"
    if readme.is_file():
        table = render_claims_by_paper(papers, answers)
        text = replace_between_marks(readme.read_text(encoding="utf-8"), "claims", table)
        made.append(MadeFile(Path("../README.md"), text))
    if (results.parent / "papers").is_dir():
        shipped = [shorten_folders_of_answer(answer, records) for answer in answers]
        csv = render(claim_tables.build_claims_table(shipped), "csv")
        made.append(MadeFile(Path("../papers") / claim_tables.SHIPPED, csv))
    return made


def render_claims_by_paper(papers: Iterable[Paper], answers: Sequence[verdicts.Answer]) -> str:
    """Renders how many claims of each paper have which verdict, as a table."""
    lines = []
    for paper in papers:
        table_names = {plan.table.name for plan in paper.tables}
        counts = Counter(answer.comparison.verdict.outcome for answer in answers if answer.claim.table in table_names)
        numbers = [str(counts[outcome]) for outcome in verdicts.OUTCOMES]
        lines.append([f"[{paper.title}](results/papers/{paper.name}.md)", *numbers])
    titles = ["Claims of", *(outcome.capitalize() for outcome in verdicts.OUTCOMES)]
    return render_github_table(titles, lines, number_columns=range(1, len(titles)))


def read_notes(paper: str, results: Path) -> str:
    """Reads what a person has written about a paper's runs; returns an empty text if there is nothing."""
    notes = results / "papers" / "notes" / f"{paper}.md"
    return notes.read_text(encoding="utf-8") if notes.is_file() else ""


def shorten_folders_of_plan(plan: plans.TablePlan, results: Path) -> plans.TablePlan:
    """Returns a planned table whose runs have the folders that its page names, those below `results`."""
    runs = tuple(replace(run, folder=run.folder.relative_to(results)) for run in plan.runs)
    return replace(plan, folder=plan.folder.relative_to(results), runs=runs)


def shorten_folders_of_answer(answer: verdicts.Answer, records: Path) -> verdicts.Answer:
    """Returns an answer whose evidence has the folders that are installed with the package, those below `records`."""
    evidence = answer.comparison.evidence
    folders = tuple(folder.relative_to(records) for folder in evidence.folders)
    pairs = []
    for pair in evidence.pairs:
        run = replace(pair.run, folder=pair.run.folder.relative_to(records))
        other_run = replace(pair.other_run, folder=pair.other_run.folder.relative_to(records))
        pairs.append(replace(pair, run=run, other_run=other_run))
    relative = replace(evidence, folders=folders, pairs=tuple(pairs))
    return replace(answer, comparison=replace(answer.comparison, evidence=relative))


def find_stale_files(folder: Path, made: Iterable[MadeFile]) -> list[Path]:
    """Finds the pages and figures that are missing in a folder, and pages that have another text than is made now."""
    stale = []
    for made_file in made:
        file = folder / made_file.path
        if not file.is_file() or file.read_text(encoding="utf-8") != made_file.text:
            stale.append(made_file.path)
        for figure in made_file.figures:
            if not (folder / figure.path).is_file():
                stale.append(figure.path)
    return stale


def find_removed_files(folder: Path, made: Iterable[MadeFile]) -> list[Path]:
    """Finds the pages in a folder whose paper or study is gone, and figures of no page; other pages do not count."""
    paths = set()
    for made_file in made:
        paths.add(made_file.path)
        paths.update(figure.path for figure in made_file.figures)
    study_pages = [file for file in folder.glob("*.md") if f"\n{EVERY_RUN}\n" in file.read_text(encoding="utf-8")]
    files = [*study_pages, *folder.glob("papers/*.md"), *folder.glob("figures/*")]
    found = [file.relative_to(folder) for file in files]
    return sorted(path for path in found if path not in paths)


def check_pages(folder: Path, made: Sequence[MadeFile]) -> None:
    """Ends the program by an error where pages and figures in a folder are not those that are made now."""
    faults = []
    stale = find_stale_files(folder, made)
    if stale:
        faults.append(f"not as they are made from the records now: {join_paths(stale)}; run 'make tables'.")
    removed = find_removed_files(folder, made)
    if removed:
        faults.append(f"of papers or studies that are no longer here: {join_paths(removed)}; delete what is named.")
    if faults:
        raise SystemExit("\n".join(faults))


def join_paths(paths: Iterable[Path]) -> str:
    """Joins paths into a line."""
    return ", ".join(path.as_posix() for path in paths)


def main(
    folder: Annotated[Path, typer.Argument()] = HERE,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a page is not as it is made now")
    ] = False,
) -> None:
    """Writes all pages in a folder and their figures: one a study, one a paper, and a first one, README.md."""
    if not (folder / "records").is_dir():
        raise SystemExit(f"'{folder}' has no runs for pages (got no folder 'records' in it); name one that has it.")
    made = make_files(folder)
    if check:
        check_pages(folder, made)
        print(f"{len(made)} files are as they are made from the records")
        return
    for made_file in made:
        file = folder / made_file.path
        write_atomically(file, partial(Path.write_text, data=made_file.text, encoding="utf-8"))
        print(file)
        for figure in made_file.figures:
            write_page_figure(folder / figure.path, find_chart(figure.kind), name_groups(figure.study))


if __name__ == "__main__":
    typer.run(main)
