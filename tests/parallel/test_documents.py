"""The scripts in README.md and docs/scripts.md, as they stand: two ranks, then a SavedModel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.limits import within

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    (document, number, script)
    for document in ("README.md", "docs/scripts.md")
    for number, script in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text("utf-8"), re.M | re.S)
    )
]


def start(script: Path, environ: dict[str, str], *options: str) -> str:
    """Runs it on two ranks by ddl-run; returns what they said."""
    argv = [
        sys.executable,
        "-c",
        "import sys; from ddl_airflow.run import main; sys.exit(main())",
        "--np",
        "2",
        *options,
    ]
    done = subprocess.run(
        [*argv, "python", str(script)],
        env=os.environ | environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(180),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# What the page leaves out of the parts about making room, which are no whole scripts.
AROUND = """
import ddl, ddl.keras, keras, numpy as np
save = train_step = lambda step: None
first, steps = 0, 2
build = lambda: keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
rows = __import__("tensorflow").data.Dataset.from_tensors((np.ones((4, 8)), np.ones((4, 1))))
"""


def test_the_parts_about_making_room_begin_and_go_on(tmp_path):
    """As one rank that nobody asks, in one process; tests/parallel/test_preemption.py asks."""
    page = (ROOT / "docs/scripts.md").read_text("utf-8")
    _, _, section = page.partition("## Asked to make room")
    loop, with_keras, *_ = re.findall(r"^```py\n(.*?)^```", section, re.M | re.S)
    assert "end_of_step" in loop and "PreemptionCallback" in with_keras
    script = "\n".join((AROUND, loop, "EPOCHS = 1", with_keras, "EPOCHS = 2", with_keras))
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\nprint('began with', done, path)"],
        env=os.environ | {"CHECKPOINT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=within(120),
        check=False,
    )
    assert f"began with 1 {tmp_path}/model-1.keras" in done.stdout, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model-1.keras", "model-2.keras"}


@pytest.mark.parametrize(
    "document, number, script", SCRIPTS, ids=[f"{one[0]}-{one[1]}" for one in SCRIPTS]
)
def test_a_script_of_the_documents_trains_and_its_model_serves(tmp_path, document, number, script):
    data, result = tmp_path / "data", tmp_path / "result"
    checkpoints = result / "checkpoints"
    for folder in (data, checkpoints):
        folder.mkdir(parents=True)
    rng = np.random.default_rng(11)
    rows = rng.normal(size=(97, 8)).astype(np.float32)  # ranks' parts differ by a row
    labels = rows[:, :4].argmax(1)
    for name in ("train.npz", "test.npz"):
        np.savez(data / name, x=rows, y=labels)
    np.save(data / "sample.npy", rows[:5])
    (tmp_path / "train.py").write_text(script, "utf-8")
    environ = {
        "DATA_DIR": str(data),
        "RESULT_DIR": str(result),
        "CHECKPOINT_DIR": str(checkpoints),
        "DDL_PROGRESS": str(tmp_path / "progress.jsonl"),
        "PARAM_EPOCHS": "2",
    }
    options = ["--tf1"] if "tf.placeholder" in script else []
    start(tmp_path / "train.py", environ, *options)
    told = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in told)

    if list(checkpoints.iterdir()):
        saved = {path.name: path.stat().st_mtime_ns for path in checkpoints.iterdir()}
        assert saved.keys() == {"model-1.keras", "model-2.keras"}
        start(tmp_path / "train.py", environ | {"PARAM_EPOCHS": "3"})
        again = {path.name: path.stat().st_mtime_ns for path in checkpoints.iterdir()}
        assert again.items() >= saved.items()  # it has gone on from there
        assert again.keys() - saved.keys() == {"model-3.keras"}

    words = ["--result-dir", result, "--data-dir", data, "--export-dir", result / "model"]
    report = tmp_path / "transform.json"
    subprocess.run(
        [sys.executable, "-m", "ddl_ops.saved_model", *map(str, words), "--report", str(report)],
        check=True,
        timeout=within(120),
    )
    assert json.loads(report.read_text())["prediction"]
