"""The pages of `results/`: one a study, one a paper from its file's card and the records, and a first one.

    python results/pages.py [DIR]          # write all pages in DIR, this folder by default, and their figures
    python results/pages.py [DIR] --check  # write nothing, and say which pages are not those that would be written

They are made from the repository alone, so they are the same on every machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from first_page import make_first_page, table_of_claims_by_paper, table_of_coverage
from paper_page import make_paper_page, papers
from studies import read_study, with_group_names
from study_page import EVERY_RUN, Figure, charts_of, make_study_page

from fedcli import registry
from fedcli.figures import find_chart
from fedcli.figures.saving import write_figure
from fedcli.files import write_atomically
from fedcli.results import claim_tables, claims, plans, verdicts
from fedcli.results.render import render, replace_between_marks

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """A page, and the figures that it shows."""

    path: Path  # under `results`
    text: str
    figures: tuple[Figure, ...] = ()


def make_pages(results: Path) -> list[Page]:
    """All pages of `results`, a folder with `records/<study>` and `papers/notes/<paper>.md`.

    A `README.md` beside the folder gets the number of claims between two marks, and a folder `papers` beside it the
    verdicts that are installed with the package.
    """
    records = results / "records"
    studies = [read_study(file.parent) for file in sorted(records.glob("*/intro.md"))]
    answers = claims.answer_claims(registry.claims(), [records])
    modules = papers()
    planned = {}
    for name, module in modules.items():
        planned[name] = [plans.plan_table(table, records, seeds=table.seeds) for table in module.TABLES]

    made = []
    for study in studies:
        figures = tuple(Figure(study, kind) for kind in charts_of(study))
        made.append(Page(Path(f"{study.name}.md"), make_study_page(study), figures))
    for name, module in modules.items():
        tables_of_paper = [plan_with_relative_folders(plan, results) for plan in planned[name]]
        notes = read_notes(name, results)
        made.append(Page(Path("papers") / f"{name}.md", make_paper_page(module, tables_of_paper, studies, notes)))
    coverage = table_of_coverage(planned)
    made.append(Page(Path("README.md"), make_first_page(records, studies, answers, coverage)))

    readme = results.parent / "README.md"
    if readme.is_file():
        table = table_of_claims_by_paper(planned, answers)
        text = replace_between_marks(readme.read_text(encoding="utf-8"), "claims", table)
        made.append(Page(Path("../README.md"), text))
    if (results.parent / "papers").is_dir():
        shipped = [answer_with_relative_folders(answer, records) for answer in answers]
        csv = render(claim_tables.build_claims_table(shipped), "csv")
        made.append(Page(Path("../papers") / claim_tables.SHIPPED, csv))
    return made


def read_notes(paper: str, results: Path) -> str:
    """What a person has written about a paper's runs; empty where there is nothing."""
    notes = results / "papers" / "notes" / f"{paper}.md"
    return notes.read_text(encoding="utf-8") if notes.is_file() else ""


def plan_with_relative_folders(plan: plans.TablePlan, results: Path) -> plans.TablePlan:
    """A planned table whose runs have the folders that its page names, those below `results`."""
    runs = tuple(with_relative_folder(run, results) for run in plan.runs)
    return replace(with_relative_folder(plan, results), runs=runs)


def answer_with_relative_folders(answer: verdicts.Answer, records: Path) -> verdicts.Answer:
    """An answer whose evidence has the folders that are installed with the package, those below `records`."""
    evidence = answer.comparison.evidence
    folders = tuple(folder.relative_to(records) for folder in evidence.folders)
    pairs = []
    for pair in evidence.pairs:
        run = with_relative_folder(pair.run, records)
        other_run = with_relative_folder(pair.other_run, records)
        pairs.append(replace(pair, run=run, other_run=other_run))
    relative = replace(evidence, folders=folders, pairs=tuple(pairs))
    return replace(answer, comparison=replace(answer.comparison, evidence=relative))


def with_relative_folder(part: Any, parent: Path) -> Any:
    """A plan or a run whose folder is told from another one on."""
    return replace(part, folder=part.folder.relative_to(parent))


def stale_pages(folder: Path, made: Iterable[Page]) -> list[Path]:
    """The pages that are missing in a folder, or have another text there than they are made with now."""
    stale = []
    for page in made:
        file = folder / page.path
        if not file.is_file() or file.read_text(encoding="utf-8") != page.text:
            stale.append(page.path)
    return stale


def removed_pages(folder: Path, made: Iterable[Page]) -> list[Path]:
    """The pages in a folder whose paper or study is gone; pages of other kinds do not count."""
    paths = {page.path for page in made}
    study_pages = [file for file in folder.glob("*.md") if f"\n{EVERY_RUN}\n" in file.read_text(encoding="utf-8")]
    found = [file.relative_to(folder) for file in (*study_pages, *folder.glob("papers/*.md"))]
    return sorted(path for path in found if path not in paths)


def check_pages(folder: Path, made: Sequence[Page]) -> None:
    """Ends the program by an error where the pages in a folder are not those that are made now."""
    faults = []
    stale = stale_pages(folder, made)
    if stale:
        faults.append(f"not as they are made from the records now: {join_paths(stale)}; run 'make tables'.")
    removed = removed_pages(folder, made)
    if removed:
        faults.append(f"of papers or studies that are no longer here: {join_paths(removed)}; delete what is named.")
    if faults:
        raise SystemExit("\n".join(faults))


def join_paths(paths: Iterable[Path]) -> str:
    """Paths in a line."""
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
    made = make_pages(folder)
    if check:
        check_pages(folder, made)
        print(f"{len(made)} pages are as they are made from the records")
        return
    for page in made:
        file = folder / page.path
        write_atomically(file, partial(Path.write_text, data=page.text, encoding="utf-8"))
        print(file)
        for figure in page.figures:
            write_figure(folder / figure.path, find_chart(figure.kind), with_group_names(figure.study), page=True)


if __name__ == "__main__":
    typer.run(main)
