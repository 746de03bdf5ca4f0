"""Data sets as uint8 tensors, by name or from files, and partitions that a file lists.

The words here:
    split: the training or the test images of a set, "train" or "test".
    column: an array with an entry for each image, by name: `x` (pixels), `y` (labels), `domain`, `writer`, `place`.
    columns: those of all images of a set; the column `test` says which split each image is in.
    arrays: the columns of each split, as an `.npz` file has them: `x_train`, `x_test` and so on.
    file format: how files keep a set; `file_formats.FILE_FORMATS` has those that can be read.
    known set: one with a name in `catalog.KNOWN`; an official one is what its publishers made, see `official.py`.
    subset: what a mixture takes of a set for one of its domains.
    partition: how training images are shared out among clients; the positions of a client's images are its part.
    division: of a client's part into what it trains on, is validated on and is tested on (`core/parts.py`).
"""
