from __future__ import annotations

import subprocess
import sys

import pytest

from ddl_airflow.core.errors import StagingError
from ddl_airflow.storage.store import check_keys


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["a", "../b"], "'../b' is no path"),
        (["a/../../b"], "is no path"),
        (["/etc/passwd"], "is no path"),
        (["a//b"], "is no path"),
        (["a/./b"], "is no path"),
        (["a/"], "is no path"),
        ([""], "is no path"),
        (["a\0b"], "is no path"),
        (["x/" + "é" * 128], "over 255 bytes"),
        (["a", "a/b"], "'a/b' needs a folder where 'a' is an object"),
        (["a/b", "a/b/c/d"], "'a/b/c/d' needs a folder where 'a/b'"),
        # As Python has what is no UTF-8 in a folder.
        (["a/caf\udce9"], r"'a/caf\\udce9' is no text in UTF-8. Rename or remove the object"),
    ],
)
def test_check_keys_refuses_what_cannot_be_files_of_one_folder(keys, said):
    with pytest.raises(StagingError, match=said) as caught:
        check_keys(["fine", *keys], "s3://bucket")
    assert not caught.value.retryable
    assert "s3://bucket" in str(caught.value)


def test_check_keys_accepts_odd_but_safe_names():
    check_keys(["a b/..c/d", "a b/ü", "...", "x\ny", "a b c"], "s3://bucket")


def test_importing_storage_imports_no_boto3():
    code = "import sys, ddl_airflow.storage; print([m for m in sys.modules if 'boto' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
