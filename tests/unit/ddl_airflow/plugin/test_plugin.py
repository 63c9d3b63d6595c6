from __future__ import annotations

import re
import subprocess
import sys
from urllib.parse import parse_qs, urlsplit

from ddl_airflow.plugin.plugin import DdlPlugin


def test_a_tab_on_each_run_leads_to_the_page_with_the_run():
    (view,) = DdlPlugin.external_views
    assert view["destination"] == "dag_run"
    url = urlsplit(view["href"])
    (app,) = DdlPlugin.fastapi_apps
    assert url.path == app["url_prefix"] + "/training"
    assert parse_qs(url.query) == {"dag_id": ["{DAG_ID}"], "run_id": ["{RUN_ID}"]}
    assert re.fullmatch(r"[a-z-]+", view["url_route"])


def test_loading_the_plugin_builds_no_web_app():
    # Every Airflow process loads it; workers need no web framework.
    code = (
        "import sys, ddl_airflow.plugin.plugin;"
        "print('fastapi' in sys.modules, 'ddl_airflow.plugin.api' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
