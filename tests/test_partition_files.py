"""Partitions made elsewhere: lists of positions in a file."""

import json

import numpy as np
import pytest
import torch

import fedcli
from fedcli.core.partition import fingerprint, from_flag
from fedcli.core.parts import divide
from fedcli.data import datasets
from fedcli.data.dataset import merge_splits
from tests.image_files import image_arrays, import_arrays
from tests.partition_parts import DIVISION_OPTIONS, deal_parts, pixels
from tests.user_errors import raises_user_error


def write_split(folder, split):
    """Writes a split into a file; returns the flag of the partition."""
    file = folder / "split.json"
    file.write_text(json.dumps(split))
    return f"file:{file}"


def test_positions_are_those_in_the_files_and_go_on_into_the_test_images(tmp_path):
    arrays = image_arrays((4, 4), 3)
    dataset = merge_splits(import_arrays("mine", tmp_path / "a", **arrays))
    all_images = [image.tobytes() for image in (*arrays["x_train"], *arrays["x_test"])]  # 9 and 6
    split = {"train": [[8, 0, 3], [10], [2]], "test": [[1, 9], [14, 9], []]}
    flag = write_split(tmp_path, split)

    parts = deal_parts(dataset, flag, 3)
    divided = divide(parts, DIVISION_OPTIONS)

    for client in range(3):
        to_train_on = sorted(all_images[position] for position in split["train"][client])
        to_test_on = sorted(all_images[position] for position in split["test"][client])
        assert sorted(pixels(dataset, divided.training[client])) == to_train_on
        assert sorted(pixels(dataset, divided.examples[client])) == to_train_on
        assert sorted(pixels(dataset, divided.testing[client])) == to_test_on
    assert fingerprint(parts) == fingerprint(deal_parts(dataset, flag, 3, seed=5))
    moved = {"train": [[8, 0, 3, 1], [10], [2]], "test": [[9], [14, 9], []]}  # from a client's test part to its own
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, moved), 3)) != fingerprint(parts)


def test_a_list_alone_and_an_npz_file_are_the_same_split(tmp_path):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    lists = [[8, 0], [], [2]]
    np.savez(tmp_path / "split.npz", train_0=[8, 0], train_1=np.array([], int), train_2=[2])
    expected = fingerprint(deal_parts(dataset, f"file:{tmp_path / 'split.npz'}", 3))
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, lists), 3)) == expected
    assert fingerprint(deal_parts(dataset, write_split(tmp_path, {"train": lists}), 3)) == expected
    (tmp_path / "split.json").write_text(json.dumps(lists), encoding="utf-8-sig")  # as some editors write it
    assert fingerprint(deal_parts(dataset, f"file:{tmp_path / 'split.json'}", 3)) == expected
    assert from_flag("file:split.json").flag == "file:split.json"
    for flag in ("file", "file:"):
        with raises_user_error("cannot be read", "write file:PATH"):
            fedcli.run("fedavg", partition=flag)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ([[0], [1], [2]], ["lists of 3 clients, not 2", "--num-clients 3"]),
        ([[0], [99]], ["position 99 is not among the 9 images", "clients' own parts"]),
        ([[0], [-1]], ["position -1"]),
        ([[0, 1], [1]], ["position 1 is in two lists"]),
        ({"train": [[0, 1], [2]], "test": [[3], [1]]}, ["position 1 is in two lists"]),
        ({"train": [[0], [1]], "test": [[5, 5], [4]]}, ["position 5 is twice in one list"]),
        ([[2, 2], [1]], ["position 2 is twice in one list"]),
        ({"train": [[0], [1]], "test": [[2]]}, ["must be lists", "2 lists to train on, 1 to test on"]),
        ([[0.5], [1]], ["must be lists", "'float' object"]),
        ([[True], [0]], ["must be lists", "has true or false in it"]),
        ({"one": [0]}, ["must be lists", "train_0"]),
        ({"train": [[0], [1]], "Test": [[5], [4]]}, ["unknown name 'Test'"]),
        ({"train": [[0], [1]], "tests": [[5], [4]]}, ["unknown name 'tests'"]),
    ],
)
def test_wrong_splits_are_refused(tmp_path, split, words):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    with raises_user_error(*words):
        deal_parts(dataset, write_split(tmp_path, split), 2)


def test_a_file_of_windows_is_read_and_one_with_two_lists_of_a_name_refused(tmp_path):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    flag = write_split(tmp_path, {"train": [[8, 0], [2]]})
    expected = fingerprint(deal_parts(dataset, flag, 2))
    file = tmp_path / "split.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        file.write_text('{\r\n"train": [\r\n[8, 0],\r\n[2]\r\n]\r\n}\r\n', encoding=encoding, newline="")
        assert fingerprint(deal_parts(dataset, flag, 2)) == expected
    file.write_text('{"train": [[8, 0], [2]], "test": [[1], [3]], "train": [[4], [5]]}')
    with raises_user_error("must be lists", "it has the name 'train' twice"):
        deal_parts(dataset, flag, 2)


def test_missing_files_unknown_places_and_pickles_are_refused(tmp_path):
    dataset = import_arrays("mine", tmp_path / "a", **image_arrays((4, 4), 3))
    with raises_user_error("'none.json' cannot be read (", "No such file", '{"train"'):
        deal_parts(dataset, "file:none.json", 2)
    np.savez(tmp_path / "split.npz", train_0=np.array([{"a": 1}], dtype=object))
    with raises_user_error("must be lists", "allow_pickle=False"):
        deal_parts(dataset, f"file:{tmp_path / 'split.npz'}", 1)
    np.savez(tmp_path / "other.npz", train_0=[0], test0=[1])
    with raises_user_error("unknown name 'test0'"):
        deal_parts(dataset, f"file:{tmp_path / 'other.npz'}", 1)
    np.savez(tmp_path / "other.npz", train_0=[0], train_images=[1])
    with raises_user_error("unknown name 'train_images'"):
        deal_parts(dataset, f"file:{tmp_path / 'other.npz'}", 1)
    flag = write_split(tmp_path, [[0], [1]])
    with raises_user_error("needs a data set with places", "import this one anew"):
        from_flag(flag)(dataset.y_train, 2, 0)


def test_a_run_tests_on_the_lists_of_the_file_and_its_record_tells(tmp_path, monkeypatch):
    split = {"train": [[0, 1, 2, 1700], [3, 4, 5]], "test": [[6, 1701], [7]]}  # 1,797 digits, of which some to test
    write_split(tmp_path, split)
    monkeypatch.chdir(tmp_path)
    options = {
        "protocol": "fedsa:digits", "partition": "file:split.json", "num_clients": 2, "cohort_size": 2, "rounds": 1,
        "batch_size": 2, "device": "cpu",
    }  # fmt: skip
    record = fedcli.run("fedavg", out=tmp_path / "run", per_class=True, **options).record
    assert record["config"]["partition"] == f"file:{tmp_path / 'split.json'}"
    assert record["partition"]["sizes"] == [6, 4]
    digits = merge_splits(datasets.load("digits"))
    is_tested = torch.isin(digits.place_train, torch.tensor([6, 1701, 7]))
    (entry,) = record["rounds"]
    assert entry["per_class"]["actual"] == torch.bincount(digits.y_train[is_tested], minlength=10).tolist()

    write_split(tmp_path, {"train": [[0], [1]], "test": [[2], [3]]})
    options |= {"protocol": "fedfm:digits", "out": tmp_path / "other"}
    with raises_user_error("has test lists, which the protocol fedfm:digits does"):
        fedcli.run("fedavg", **options)
    assert not (tmp_path / "other").exists()
