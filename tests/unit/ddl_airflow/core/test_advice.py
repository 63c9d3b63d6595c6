from __future__ import annotations

import pytest

from ddl_airflow.core.advice import VARIABLES, advice
from ddl_airflow.core.environment import of_run
from ddl_airflow.core.layout import RunLayout


@pytest.mark.parametrize(
    "kind, message, says",
    [
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'x.csv'", "$DATA_DIR"),
        ("FileNotFoundError", "[Errno 2] No such file or directory: '/srv/x'", "Each host"),
        (
            "NotFoundError",
            "/opt/DL/lib/ddl_MDR.so: cannot open shared object file: No such file or directory",
            "TensorFlow 1 mode has it. If the script is for TensorFlow 1, write framework",
        ),
        ("PermissionError", "[Errno 13] Permission denied: '/etc/x'", "$RESULT_DIR"),
        ("KeyError", "'DATADIR'", "Did you mean DATA_DIR?"),
        ("KeyError", "'PARAM_RATE'", "Add rate to"),
        ("ModuleNotFoundError", "No module named 'horovod.x'", "coming-from-horovod.md"),
        ("AttributeError", "module 'tensorflow' has no attribute 'Session'", "--tf1"),
        ("ModuleNotFoundError", "No module named 'tensorflow.contrib'", "--tf1"),
        (
            "ImportError",
            "cannot import name 'multi_gpu_model' from 'keras.utils' (a/keras/utils/__init__.py)",
            "each rank trains on a GPU of its own",
        ),
        ("AttributeError", "module 'keras.utils' has no attribute 'multi_gpu_model'", "each rank"),
        ("ModuleNotFoundError", "No module named 'keras.utils.training_utils'", "each rank"),
        (
            "ModuleNotFoundError",
            "No module named 'tensorflow_large_model_support'",
            "smaller batch",
        ),
        ("ImportError", "tensorflow.contrib.lms left TensorFlow with version 2", "Take it out"),
        (
            "AttributeError",
            "module 'tensorflow._api.v2.config.experimental' has no attribute 'set_lms_enabled'",
            "Take it out",
        ),
        (
            "TypeError",
            "_DistributedOptimizer.__init__() got multiple values for argument 'name'",
            'config.pop("name", None)',
        ),
        ("MemoryError", "", "smaller batch"),
        ("EOFError", "EOF when reading a line", "parameters"),
        ("Exception", "URL fetch failure on https://a/b: None -- timed out", "training_data_ref"),
    ],
)
def test_what_many_meet_has_a_cure(kind, message, says):
    assert says in advice(kind, message)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("KeyError", "'label'"),
        ("KeyError", "'HOSTNAME'"),
        ("KeyError", "17"),
        ("ModuleNotFoundError", "No module named 'horovodish'"),
        ("AttributeError", "module 'numpy' has no attribute 'float'"),
        ("Exception", "no idea"),
        ("ValueError", "timed out"),
        ("", ""),
    ],
)
def test_nothing_is_guessed(kind, message):
    assert advice(kind, message) == ""


def test_its_variables_are_those_of_ranks(tmp_path):
    given = of_run(RunLayout(tmp_path, "digits", "digits-1"), "digits")
    of_ranks = {"LEARNER_ID", "NUM_LEARNERS", "GPU_COUNT"}
    assert {*VARIABLES} - of_ranks == {name for name in given if not name.startswith("DDL_")}
