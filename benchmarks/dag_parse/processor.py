"""A DAG processor of Airflow over manifests that nobody changes, and what it takes."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.turns import die_with_parent

_START_S = 1200.0
_LAST_LINES = 30
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(
    home: Path, bundle: Mapping[str, Any], count: int, interval_s: int, window_s: float
) -> dict[str, float]:
    """CPU seconds until all DAGs are stored, and per minute from then on.

    Args:
        home: for Airflow's database; new.
        bundle: an entry of dag_bundle_config_list.
        count: how many DAGs there will be.
        interval_s: min_file_process_interval.
        window_s: how long to watch.

    Raises RuntimeError, with what it said last, if the processor ends or does not store them in
    time.
    """
    home.mkdir(parents=True)
    database = home / "airflow.db"
    environment = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__FERNET_KEY": "",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{database}",
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps([bundle]),
        "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(home / "bundles"),
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": str(interval_s),
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "30",
    }
    airflow = [sys.executable, "-m", "airflow"]
    subprocess.run([*airflow, "db", "migrate"], env=environment, check=True, capture_output=True)
    said = home / "processor.log"
    with said.open("wb") as log:
        process = subprocess.Popen(
            [*airflow, "dag-processor"],
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        deadline = time.monotonic() + _START_S
        while _stored(database) < count:
            if process.poll() is not None or time.monotonic() > deadline:
                last = said.read_text(errors="replace").splitlines()[-_LAST_LINES:]
                raise RuntimeError(
                    "\n".join([f"{_stored(database)} of {count} DAGs stored. At its end:", *last])
                )
            time.sleep(0.5)
        time.sleep(2)  # what was under way ends
        first = _cpu_s(process.pid)
        started = time.monotonic()
        time.sleep(window_s)
        minute = (_cpu_s(process.pid) - first) * 60 / (time.monotonic() - started)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {"first_cpu_s": first, "minute_cpu_s": minute}


def _stored(database: Path) -> int:
    try:
        with sqlite3.connect(database, timeout=30) as connection:
            (count,) = connection.execute("select count(*) from serialized_dag").fetchone()
    except sqlite3.OperationalError:
        return 0  # busy
    finally:
        connection.close()
    return int(count)


def _cpu_s(pid: int) -> float:
    """CPU of a process and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS
