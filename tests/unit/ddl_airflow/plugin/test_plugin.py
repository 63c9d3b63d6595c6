from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from ddl_airflow.plugin.plugin import DdlPlugin


def test_views_lead_to_the_page_with_what_they_are_of():
    (app,) = DdlPlugin.fastapi_apps
    asked = {}
    for view in DdlPlugin.external_views:
        url = urlsplit(view["href"])
        assert url.path == app["url_prefix"] + "/training"
        asked[view["destination"]] = parse_qs(url.query)
        assert re.fullmatch(r"[a-z-]+", view["url_route"])
    run = {"dag_id": ["{DAG_ID}"], "run_id": ["{RUN_ID}"]}
    of = {"nav": {}, "dag": {"dag_id": ["{DAG_ID}"]}, "dag_run": run, "task_instance": run}
    assert asked == of
    assert len({view["url_route"] for view in DdlPlugin.external_views}) == 4


def test_views_are_below_the_path_of_the_sites_address():
    """Airflow's UI loads them as they are, whatever path it is below itself."""
    code = (
        "import json; from ddl_airflow.plugin.plugin import DdlPlugin;"
        "print(json.dumps([view['href'] for view in DdlPlugin.external_views]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"AIRFLOW__API__BASE_URL": "https://site.example/airflow/"},
    )
    hrefs = json.loads(done.stdout)
    assert {urlsplit(href).path for href in hrefs} == {"/airflow/ddl/training"}


def test_the_page_is_what_its_sources_are_built_to():
    """As ui/vite.config.ts says; `make ui` builds it."""
    root = Path(__file__).parents[4]
    names = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"]
    names += [f"src/{path.name}" for path in (root / "ui" / "src").iterdir()]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\0".encode() + (root / "ui" / name).read_bytes() + b"\0")
    built = root / "ddl_airflow" / "plugin" / "built"
    assert (built / "sources.sha256").read_text().strip() == digest.hexdigest(), "make ui"
    whose = (built / "licenses.txt").read_text()
    assert "uplot" in whose and "preact" in whose and whose.count("Permission is hereby") == 2
    page = "".join(path.read_text("utf-8") for path in (built / "assets").iterdir())
    # Names of XML's namespaces are no addresses.
    assert set(re.findall(r"https?://[a-z0-9.]+", page)) <= {"http://www.w3.org"}
    lock = json.loads((root / "ui" / "package-lock.json").read_bytes())
    assert not [name for name, one in lock["packages"].items() if "resolved" in one]


def test_loading_the_plugin_builds_no_web_app():
    # Every Airflow process loads it; workers need no web framework.
    code = (
        "import sys, ddl_airflow.plugin.plugin;"
        "print('fastapi' in sys.modules, 'ddl_airflow.plugin.api' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
