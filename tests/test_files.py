"""Files that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from fedcli.files import write_atomically
from tests.run_parts import file_names


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")
    link = tmp_path / "link"
    link.symlink_to("file")
    write_atomically(link, lambda path: path.write_text("new"))
    assert link.is_symlink()
    assert file.read_text() == "new"

    new_file = tmp_path / "another"
    write_atomically(new_file, lambda path: path.write_text("newer"))
    assert not new_file.is_symlink()

    write_atomically(Path(os.devnull), lambda path: path.write_text("new"))
    assert not Path(os.devnull).is_file()


def test_an_error_of_a_library_without_a_number_keeps_its_words(tmp_path):
    def fails(path):
        raise OSError("encoder error -2 when writing image file")

    with pytest.raises(OSError, match="encoder error -2 when writing image file") as caught:
        write_atomically(tmp_path / "a.png", fails)
    assert caught.value.filename == str(tmp_path / "a.png")


def test_two_containers_with_one_cache_and_equal_process_ids_do_not_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 7)
    file = tmp_path / "file"

    def write_while_another_does(path):
        path.write_text("whole")
        write_atomically(file, lambda other: other.write_text("other"))
        assert file.read_text() == "other"
        assert path.read_text() == "whole"

    write_atomically(file, write_while_another_does)
    assert file.read_text() == "whole"
    assert file_names(tmp_path) == ["file"]
