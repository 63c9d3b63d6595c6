"""Links on tasks, in Airflow's UI: to the run's Training tab, TensorBoard, and the published files.

A task leaves its links when it has ended, well or not. One that leads nowhere is left out.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, urljoin

from airflow.configuration import conf
from airflow.sdk import BaseOperatorLink

from ddl_airflow.core.manifest.sections.stores import kind_of_uri
from ddl_airflow.site import training_of

TAB = "ddl-training"  # of the page in the run's URL


def tensorboard() -> str | None:
    """Where the site's TensorBoard is: ``[ddl] tensorboard_url``. None if it has none."""
    return _web_page(conf.get("ddl", "tensorboard_url", fallback=""))


def _web_page(address: str) -> str | None:
    """What is no address of a web page is no link either."""
    address = address.strip()
    return address if re.match(r"https?://", address) else None


class TrainingLink(BaseOperatorLink):
    """The run's Training tab: progress, curves, and the logs of all ranks."""

    name = "Training and logs of the ranks"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """The tab's address."""
        dag_id, run_id = quote(ti_key.dag_id, safe=""), quote(ti_key.run_id, safe="")
        base = conf.get("api", "base_url", fallback="/").rstrip("/") + "/"
        return urljoin(base, f"dags/{dag_id}/runs/{run_id}/plugin/{TAB}")


class TensorBoardLink(BaseOperatorLink):
    """The site's TensorBoard."""

    name = "TensorBoard"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Its address."""
        return tensorboard() or ""


class ResultsLink(BaseOperatorLink):
    """What was published, in the site's browser of the object store."""

    name = "Results in the store"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """``[ddl] results_url`` of the training's bucket and folder."""
        uri = operator.results["uri"]
        address = _web_page(conf.get("ddl", "results_url", fallback=""))
        kind = kind_of_uri(uri)
        if kind is None or not kind.has_buckets or address is None:
            return ""
        bucket, *folders = uri.removeprefix(f"{kind.scheme}://").split("/")
        prefix = "/".join((*folders, training_of(ti_key.dag_id, ti_key.run_id)))
        return address.replace("{bucket}", quote(bucket)).replace("{prefix}", quote(prefix))
