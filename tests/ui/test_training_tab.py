"""What a person sees: a browser, a login, the run's page, the Training tab, links, forms."""

from __future__ import annotations

import json
import re
from urllib.parse import urlencode

import httpx
import pytest
from playwright.sync_api import expect

from ddl_airflow.demo.show import DATA_BUCKET
from ddl_airflow.links import TAB
from tests.event_files import losses, write_events
from tests.limits import within
from tests.screenshots import picture, shot

pytestmark = pytest.mark.integration


def test_dag_shows_the_four_steps_in_order(page, site, finished):
    run_id, _ = finished["mnist-tf1"]
    page.goto(site.run_url("mnist-tf1", run_id))
    for name in ("stage-data", "train", "transform", "upload-results"):
        expect(page.get_by_text(name, exact=True).first).to_be_visible()
    shot(page, "run")


def test_training_tab_draws_the_loss(page, site, finished):
    run_id, _ = finished["mnist-tf1"]
    page.goto(f"{site.run_url('mnist-tf1', run_id)}")
    tabs = [page.get_by_role(role, name="Training", exact=True) for role in ("link", "tab")]
    tabs[0].or_(tabs[1]).click()
    frame = page.frame_locator("iframe")
    loss = frame.locator("figure", has=frame.locator("h3", has_text="loss"))
    expect(loss.locator("canvas")).to_be_visible()
    loss.locator("summary").click()
    expect(loss.locator("tbody tr").nth(19)).to_be_visible()
    loss.locator("summary").click()
    expect(frame.locator("#tasks .success")).to_have_count(4)
    expect(frame.locator("#now")).to_contain_text("400 / 400")
    expect(frame.locator(".progress")).to_have_text("100%")
    # The numbers are those of the lineage, and a number's source is beside it.
    (kept,) = (site.home / "ddl" / "runs" / "mnist-tf1").glob("*/airflow/lineage.json")
    record = json.loads(kept.read_bytes())
    for name, value in record["result"]["metrics"].items():
        fact = frame.locator(
            "#now > div", has=frame.locator("dt", has_text=re.compile(f"^{name}$"))
        )
        expect(fact.filter(has_text=f"{value:#.4g}")).to_have_count(1)
    expect(frame.locator("#now")).to_contain_text("the output")
    expect(frame.locator("#lanes tbody tr")).to_have_count(2)
    expect(frame.locator("#tries")).to_contain_text("2 ranks ended well")
    shot(page, "training")
    # The chips stand as the steps run.
    chips = [
        f"✓ {name}: success" for name in ("stage-data", "train", "transform", "upload-results")
    ]
    expect(frame.locator("#tasks li")).to_have_text(chips)
    frame.get_by_role("button", name="Log of rank 1").click()
    expect(frame.locator("#logs select")).to_have_value("1")
    expect(frame.locator("#shown")).to_contain_text("all ")
    with page.expect_download() as log:
        frame.get_by_role("link", name="Whole log").click()
    assert log.value.suggested_filename == "mnist-tf1-rank-1.log"
    frame.get_by_role("link", name="Lineage, with all digests").click()
    expect(frame.locator(".node.model")).to_be_visible()
    # The manifest has its keys from variables of the workers, which the api-server has not.
    expect(frame.get_by_text("Whether it is in production is not known")).to_be_visible()
    shot(page, "lineage")


def test_trainings_are_in_the_navigation_and_on_the_dag(page, site, finished):
    page.goto(f"{site.url}/plugin/ddl-trainings")
    frame = page.frame_locator("iframe")
    for dag_id in ("mnist-tf1", "mnist-keras"):
        # Other tests may have begun others since.
        row = frame.locator("#trainings tr", has_text=dag_id).filter(has_text=finished[dag_id][0])
        expect(row).to_contain_text("published")
    picture(page, "trainings")
    # Of its connection the api-server asks the store which model is the newest.
    row.get_by_role("link", name="Lineage").first.click()
    expect(frame.locator(".node.pointer", has_text="latest")).to_be_visible()
    shot(page, "lineage-keras")
    frame.get_by_role("link", name="← Trainings").click()
    for dag_id in ("mnist-keras", "horovod-keras"):
        frame.get_by_label(f"Compare {dag_id}/{finished[dag_id][0]}").check()
    frame.get_by_role("link", name="Compare the two").click()
    expect(frame.locator("#charts canvas")).not_to_have_count(0)
    expect(frame.locator("#differences tr", has_text="manifest.name")).to_contain_text("horovod")
    picture(page, "comparison")
    page.goto(f"{site.url}/dags/mnist-tf1/plugin/ddl-dag")
    expect(frame.locator("#trainings tbody tr").first).to_contain_text("mnist-tf1")
    expect(frame.locator("#trainings tr", has_text="mnist-keras")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_training_tab_has_airflows_theme(page, site, finished, theme):
    run_id, _ = finished["mnist-keras"]
    page.evaluate(f"localStorage.setItem('theme', '{theme}')")
    page.goto(f"{site.run_url('mnist-keras', run_id)}/plugin/{TAB}")
    frame = page.frame_locator("iframe")
    expect(frame.locator("#now")).to_contain_text("sample t10k-images-idx3-ubyte.gz")
    ink = {"light": "rgb(28, 39, 51)", "dark": "rgb(230, 235, 241)"}[theme]
    expect(frame.locator("body")).to_have_css("color", ink)
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    expect(frame.locator("body")).to_have_css("background-color", paper)
    expect(frame.locator("#charts canvas")).not_to_have_count(0)
    picture(page, f"training-{theme}")


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("train", ("Training and logs of the ranks", "TensorBoard")),
        ("upload_results", ("Results in the store",)),
    ],
)
def test_links_of_a_task_open(page, site, object_store, finished, task, names):
    run_id, _ = finished["mnist-tf1"]
    for name in names:
        page.goto(f"{site.run_url('mnist-tf1', run_id)}/tasks/{task}/details")
        link = page.get_by_role("link", name=name)
        expect(link).to_be_visible()
        shot(page, f"links-{task}")
        address = link.get_attribute("href")
        if name.startswith("Training"):
            link.click()
            expect(page.frame_locator("iframe").locator("#logs option")).to_have_count(2)
        else:
            assert address.startswith(object_store.endpoint_url)
            assert httpx.get(address).status_code in (200, 403)  # no keys, so not its content


def test_connection_form_asks_for_the_store_and_test_asks_the_store(page, site, object_store):
    address, _, port = object_store.endpoint_url.rpartition(":")
    page.goto(f"{site.url}/connections")
    page.get_by_role("button", name="Add Connection").first.click()
    form = page.get_by_role("dialog")
    form.locator("input[name=connection_id]").fill("made_in_the_ui")
    form.get_by_role("combobox").first.click()
    page.keyboard.type("DDL object store")
    page.keyboard.press("Enter")
    for name, value in (
        ("host", address),
        ("port", port),
        ("login", object_store.access_key_id),
        ("password", object_store.secret_access_key),
    ):
        form.locator(f"input[name={name}]").fill(value)
    for text in ("Endpoint", "Access key ID", "Secret access key"):
        expect(form.get_by_text(text, exact=True)).to_be_visible()
    assert form.locator("input[name=password]").get_attribute("type") == "password"
    shot(page, "connection-form")
    form.get_by_text("Extra Fields", exact=True).click()
    form.locator("input[name=element_bucket]").fill(DATA_BUCKET)
    expect(form.get_by_text("CA certificates", exact=True)).to_be_visible()
    form.get_by_role("button", name="Save").click()
    expect(form).to_be_hidden()
    with page.expect_response(lambda answer: answer.url.endswith("/connections/test")) as tested:
        page.get_by_role("button", name="Test Connection").first.click()
    assert tested.value.json() == {
        "status": True,
        "message": f"{object_store.endpoint_url} takes the keys: s3://{DATA_BUCKET} is there",
    }
    shot(page, "connection-tested")


def test_train_task_shows_its_settings(page, site, finished):
    run_id, _ = finished["mnist-tf1"]
    page.goto(f"{site.run_url('mnist-tf1', run_id)}/tasks/train/rendered_templates")
    for text in ("python train.py", "tensorflow-ddl 1.13", "nodes"):
        expect(page.get_by_text(text, exact=False).first).to_be_visible()
    shot(page, "rendered")


def test_trigger_form_asks_for_the_manifests_parameters(page, site, finished):
    page.goto(f"{site.url}/dags/mnist-keras")
    page.get_by_role("button", name="Trigger").first.click()
    dialog = page.get_by_role("dialog")
    # Airflow opens the fields that have no section.
    for text in ("epochs", "learning_rate", "Passes over the data"):
        expect(dialog.get_by_text(text, exact=False).first).to_be_visible()
    dialog.get_by_text("This run").first.click()
    for text in ("Nodes", "Checkpoint", "Attempts", "Dry run"):
        expect(dialog.get_by_text(text).first).to_be_visible()
    shot(page, "trigger-form")


def test_what_is_of_a_training_is_for_those_who_may_read_the_run(site, finished):
    run_id, _ = finished["mnist-tf1"]
    for what in ("about/", "curves/", "graph/", "log/0/", "log-part/0/"):
        assert httpx.get(f"{site.url}/ddl/{what}mnist-tf1/{run_id}").status_code == 401
    for what in ("trainings", "rights/mnist-tf1"):
        assert httpx.get(f"{site.url}/ddl/{what}").status_code == 401


def test_tensorboard_behind_the_login_has_no_part_in_it(page, site):
    site.wait_for_dag("mnist-tf1")
    layout = site.layout("mnist-tf1", "by-hand")
    layout.create()
    write_events(layout.logs / "train", losses())
    asked = {"dag_id": "mnist-tf1", "run_id": "by-hand"}
    page.goto(f"{site.url}/ddl/training?{urlencode(asked)}")
    page.get_by_role("button", name="TensorBoard of this training").click()
    expect(page).to_have_title("TensorBoard", timeout=within(60_000))
    card = page.locator("scalar-card").filter(has=page.get_by_text("loss", exact=True)).first
    expect(card.locator("line-chart canvas").first).to_be_visible()
    expect(card).to_contain_text("0.04")
    shot(page, "tensorboard")
    assert any(cookie["name"] == "_token" for cookie in page.context.cookies())
    read = "(path) => fetch(path, {credentials: 'include'}).then((a) => a.status, (e) => e.name)"
    for path in ("/api/v2/dags", "/ddl/trainings", "/ddl/about/mnist-tf1/by-hand"):
        assert page.evaluate(read, path) == "TypeError"
    address = page.url
    page.goto(f"{site.url}/ddl/training?{urlencode(asked)}")
    same = page.evaluate(read, "/api/v2/dags")
    assert same == 200  # so it was not the login that was missing
    # The address opens it without one; and not when it is another's.
    assert httpx.get(f"{address.partition('#')[0]}data/runs").json() == ["logs/train"]
    assert httpx.get(f"{site.url}/ddl/tensorboard/{'x' * 60}/data/runs").status_code == 403
    refused = httpx.post(f"{site.url}/ddl/tensorboard-of/mnist-tf1/by-hand")
    assert refused.status_code == 401
