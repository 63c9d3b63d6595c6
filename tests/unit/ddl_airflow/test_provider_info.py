from __future__ import annotations

import importlib
import json
import re
from importlib import metadata, resources
from pathlib import Path

import jsonschema
from airflow.configuration import conf
from airflow.providers_manager import ProvidersManager
from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

from ddl_airflow import __version__
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.upload import UploadResultsOperator
from ddl_airflow.provider_info import get_provider_info

PACKAGE = Path(__file__).parents[3] / "ddl_airflow"


def test_airflows_schema_accepts_it():
    schema = json.loads(
        resources.files("airflow").joinpath("provider_info.schema.json").read_text()
    )
    jsonschema.validate(get_provider_info(), schema)


def test_every_module_that_it_names_is_there():
    info = get_provider_info()
    for kind in ("operators", "hooks", "triggers", "bundles"):
        for part in info[kind]:
            for name in part["python-modules"]:
                importlib.import_module(name)


def test_airflow_finds_the_connection_type_with_its_form_and_the_links():
    known = ProvidersManager()
    assert known.providers["ddl-airflow"].version == __version__
    hook = ProvidersManagerTaskRuntime().hooks["ddlstore"]
    assert (hook.hook_name, hook.package_name) == ("DDL object store", "ddl-airflow")
    assert hook.connection_testable
    fields = {
        one.field_name: one.field["schema"]["title"]
        for name, one in known.connection_form_widgets.items()
        if name.startswith("extra__ddlstore__")
    }
    assert fields == {
        "region_name": "Region",
        "ca_bundle": "CA certificates",
        "bucket": "Bucket to test",
    }
    assert known.field_behaviours["ddlstore"]["relabeling"]["password"] == "Secret access key"
    links = {name for name in known.extra_links_class_names if name.startswith("ddl_airflow.")}
    assert links == {
        f"{type(link).__module__}.{type(link).__qualname__}"
        for operator in (TrainOperator, UploadResultsOperator)
        for link in operator.operator_extra_links
    }


def test_every_option_is_read_and_every_one_that_is_read_is_described():
    sources = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r'conf\.get\w*\(\s*"ddl",\s*"(\w+)"', sources))
    assert read == set(get_provider_info()["config"]["ddl"]["options"])


def test_entry_points_lead_here():
    (provider,) = [
        point
        for point in metadata.entry_points(group="apache_airflow_provider")
        if point.value.startswith("ddl_airflow")
    ]
    assert provider.load()()["versions"] == [__version__]
    (plugin,) = [
        point
        for point in metadata.entry_points(group="airflow.plugins")
        if point.value.startswith("ddl_airflow")
    ]
    assert plugin.load().name == "ddl"


def test_airflow_knows_every_option_and_its_default(monkeypatch):
    options = get_provider_info()["config"]["ddl"]["options"]
    for name in options:
        monkeypatch.delenv(f"AIRFLOW__DDL__{name.upper()}", raising=False)
    assert conf.getfloat("ddl", "job_poll_interval") == 5
    assert conf.getfloat("ddl", "data_poll_interval") == 60
    assert conf.getint("ddl", "transfer_workers") == 8
    assert conf.get("ddl", "python") == ""
    assert conf.get("ddl", "workspace").endswith("/ddl")
