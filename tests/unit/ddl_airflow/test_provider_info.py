from __future__ import annotations

import importlib
import json
from importlib import metadata, resources

import jsonschema
from airflow.configuration import conf

from ddl_airflow import __version__
from ddl_airflow.provider_info import get_provider_info


def test_airflows_schema_accepts_it():
    schema = json.loads(
        resources.files("airflow").joinpath("provider_info.schema.json").read_text()
    )
    jsonschema.validate(get_provider_info(), schema)


def test_every_module_that_it_names_is_there():
    info = get_provider_info()
    for part in (*info["operators"], *info["bundles"]):
        for name in part["python-modules"]:
            importlib.import_module(name)


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
    assert set(options) == {
        *("workspace", "python", "results_url", "tensorboard_url", "transfer_workers"),
        *("data_poll_interval", "job_poll_interval"),
    }
    assert conf.getfloat("ddl", "job_poll_interval") == 5
    assert conf.getfloat("ddl", "data_poll_interval") == 60
    assert conf.getint("ddl", "transfer_workers") == 8
    assert conf.get("ddl", "python") == ""
    assert conf.get("ddl", "workspace").endswith("/ddl")
