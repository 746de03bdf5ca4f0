"""Files of the user's own, `./file.py:NAME` in an option.

Their names are in `paths`, their hashes in `hashes`, what of a record may be imported in `trust`, the import itself and
the blame for what they raise in `modules`.
"""

from fedcli.userfiles.hashes import add_hash, file_hash, first_hash, has_several_hashes, is_hash_of, last_hash
from fedcli.userfiles.modules import (
    FromFile,
    blame,
    from_file,
    hash_of_module,
    import_file,
    imported_hash,
    is_own,
)
from fedcli.userfiles.paths import (
    UserPart,
    absolute,
    is_from_file,
    own_paths,
    path_and_name,
    replace_paths,
    seen_from,
    short_name,
)
from fedcli.userfiles.trust import trust_files, user_files

__all__ = [
    "FromFile", "UserPart", "absolute", "add_hash", "blame", "file_hash", "first_hash", "from_file",
    "has_several_hashes", "hash_of_module", "import_file", "imported_hash", "is_from_file", "is_hash_of", "is_own",
    "last_hash", "own_paths", "path_and_name", "replace_paths", "seen_from", "short_name", "trust_files", "user_files",
]  # fmt: skip
