"""docs/tutorial.md as it stands, in a shell: with the store, without Airflow.

With DDL_TUTORIAL=1 all of it, Airflow too, which takes some minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_airflow.demo.site import free_port
from tests.limits import within
from tests.pages import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
_BLOCK = re.compile(r"^```(sh|python|yaml)\n(.*?)^```", re.M | re.S)
# What a person sees in the UI: that the run is over.
_WAIT = "until airflow dags state digits {run} | grep -E '^(success|failed)'; do sleep 3; done\n"
_NO_AIRFLOW = ("## 4.", "## 5.", "## 7.")


def _script(*, airflow: bool) -> str:
    """The commands of the page in their order; files that it shows are written where they are."""
    script = ""
    for section in re.split(r"^(?=## \d)", PAGE.read_text("utf-8"), flags=re.M)[1:]:
        if not airflow and section.startswith(_NO_AIRFLOW):
            continue
        for language, text in _BLOCK.findall(section):
            if language == "sh":
                script += text
                if run := re.search(r"dags trigger digits --run-id (\w+)", text):
                    script += _WAIT.format(run=run[1])
            else:
                name = text.splitlines()[0].removeprefix("# ")
                script += f"cat > {name} <<'END'\n{text}END\n"
    if not airflow:  # Airflow publishes in the bucket; so does this
        script = script.replace("--set epochs=1", "--set epochs=1 --publish").replace("%2 ", "")
    return script.replace("../dags", str(ROOT / "dags"))


def _run(script: str, folder: Path, seconds: float) -> str:
    for port in ("9000", "8080"):
        script = script.replace(f"127.0.0.1:{port}", f"127.0.0.1:{(free := free_port())}")
        script = script.replace(f"-p {port}", f"-p {free}").replace(f"PORT={port}", f"PORT={free}")
    own = ("AIRFLOW", "AWS_", "DDL_", "OMPI_", "PARAM_")
    environ = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "ops_lib" / "python")])
    # Whatever fails, the servers end with the shell. As a person's, each job is a group of its own.
    head = "set -em\ntrap 'for job in $(jobs -p); do kill -- -$job 2>/dev/null || :; done' EXIT\n"
    store = "until (: > /dev/tcp/127.0.0.1/$STORE) 2>/dev/null; do sleep 0.2; done\n"
    (port,) = set(re.findall(r"moto_server .* -p (\d+)", script))
    script = re.sub(r"(?m)^(moto_server .*\n)", rf"\1{store.replace('$STORE', port)}", script)
    with (folder / "said").open("w+") as said:
        code = subprocess.run(
            ["bash", "-c", head + script],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        ).returncode
        said.seek(0)
        text = said.read()
    assert code == 0, text[-4000:]
    assert not (folder / "tutorial").exists()
    return text


def test_the_tutorial_leads_to_a_model_in_production_that_predicts(tmp_path):
    said = _run(_script(airflow=False), tmp_path, within(300))
    assert "good: DAG digits, 2 ranks" in said
    assert "trained on 2 rank(s)" in said
    assert '"event": "promoted"' in said  # ddl-airflow production
    assert re.search(r"production  digits-by-hand-\S+/\S+ +accuracy=0\.[89]", said)
    assert re.search(r"^digits-by-hand-\S+ says( \d){8}$", said, re.M)


@pytest.mark.skipif("DDL_TUTORIAL" not in os.environ, reason="DDL_TUTORIAL=1 runs it; minutes")
def test_the_whole_tutorial_trains_in_airflow_and_goes_back(tmp_path):
    said = _run(_script(airflow=True), tmp_path, within(1200))
    assert re.search(r"^digits-first-\w+ says( \d){8}$", said, re.M)
    assert "parameters  epochs: 2 -> 4" in said
    assert "files are as recorded" in said
    assert re.search(r"production  digits-first-", said.split("in production again: ")[1])
