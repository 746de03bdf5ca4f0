"""Files of the user's own, `./file.py:NAME` in an option.

Their names are in `paths`, their hashes in `hashes`, what of a record may be imported in `trust`, the import itself and
the blame for what they raise in `modules`.
"""

from fedcli.userfiles.hashes import add_hash, file_hash, first_hash, has_several_hashes, is_hash_of, last_hash
from fedcli.userfiles.modules import (
    UserFunction,
    blame,
    find_user_function,
    hash_of_module,
    import_file,
    imported_hash,
    is_user_module,
)
from fedcli.userfiles.paths import (
    UserReference,
    make_absolute,
    names_user_file,
    path_and_name,
    replace_paths,
    resolve_beside,
    short_name,
    user_paths,
)
from fedcli.userfiles.trust import trust_files, user_files

__all__ = [
    "UserFunction", "UserReference", "add_hash", "blame", "file_hash", "find_user_function", "first_hash",
    "has_several_hashes", "hash_of_module", "import_file", "imported_hash", "is_hash_of", "is_user_module", "last_hash",
    "make_absolute", "names_user_file", "path_and_name", "replace_paths", "resolve_beside", "short_name", "trust_files",
    "user_files", "user_paths",
]  # fmt: skip
