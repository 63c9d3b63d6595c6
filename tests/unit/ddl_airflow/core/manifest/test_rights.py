from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.rights import Rights, RightsTable, beyond, looked_up
from ddl_airflow.core.real_path import first_link

MANIFEST = """\
model_definition:
  name: small
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py
    compute_configuration: {{name: cpu}}
training_data_reference:
  {data}
training_results_reference:
  {results}
{more}
"""
OWN = {
    "data": "{type: fs, source: {path: ./data}}",
    "results": "{type: fs, target: {path: ./results}}",
}
S3 = "{{type: s3, connection: {{conn_id: {}}}, {}: {{bucket: some-bucket}}}}"


@pytest.fixture
def found(tmp_path):
    """found(rights, data=, results=, more=) -> fields that are beyond the rights, and why."""

    def find(rights: Rights | None, more: str = "", **places: str) -> dict[str, str]:
        path = tmp_path / "team" / "manifest.yml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(MANIFEST.format(**OWN | places, more=more))
        return {one.field: f"{one.message} {one.fix}" for one in beyond_of(path, rights)}

    def beyond_of(path: Path, rights: Rights | None):
        folder = path.parent.resolve()
        return list(beyond(load_manifest(path), folder, rights, lambda notifier: {}))

    return find


def table(**folders) -> str:
    return json.dumps({"rights": folders})


def rights_of(setting: str, folder: Path) -> Rights:
    found = RightsTable.read(setting)
    assert found is not None
    return found.of(folder)


def test_where_the_site_says_nothing_all_may_name_what_they_like(tmp_path, found):
    assert RightsTable.read(" ") is None
    elsewhere = S3.format("any", "source")
    assert found(None, data=elsewhere, results="{type: fs, target: {path: /srv/all}}") == {}


def test_the_nearest_folder_above_says_what_holds(tmp_path):
    near = tmp_path / "dags" / "team" / "vision"
    near.mkdir(parents=True)
    setting = table(
        **{
            str(tmp_path / "dags"): {"connections": ["common"]},
            str(near.parent): {
                "connections": ["team_*"],
                "paths": ["/data/team"],
                "variables": ["TEAM_*"],
            },
            str(tmp_path / "dags" / "team-b"): None,
        }
    )
    assert rights_of(setting, near) == Rights(
        ("team_*",), (Path("/data/team"),), variables=("TEAM_*",)
    )
    assert rights_of(setting, tmp_path / "dags" / "other").connections == ("common",)
    assert rights_of(setting, tmp_path / "dags" / "team-b") == Rights()
    assert rights_of(setting, tmp_path) == Rights()
    # Where a folder lies has been looked for: no link is followed that is put there meanwhile.
    (tmp_path / "dags" / "link").symlink_to(near)
    assert rights_of(setting, tmp_path / "dags" / "link").connections == ("common",)
    (tmp_path / "rights.yml").write_text(setting)
    assert rights_of(str(tmp_path / "rights.yml"), near).connections == ("team_*",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"rights": {"dags": {}}}', "'dags' is no absolute path"),
        ('{"rights": {"/a": {"paths": ["x"]}}}', "'x' is no absolute path"),
        ('{"rights": {"/a\\u0000b": {}}}', "is no absolute path"),
        ('{"rights": {"/a": {"launchers": ["fake"]}}}', "'fake' is no launcher"),
        ('{"rights": {"/a": {"conn": []}}}', "unknown field"),
        ("/no/such/file.yml", r"cannot be read: .*\[ddl\] manifest_rights"),
    ],
)
def test_what_is_wrong_in_the_table_is_said(text, words, tmp_path):
    with pytest.raises(ManifestError, match=words):
        rights_of(text, tmp_path)


def test_a_link_to_itself_ends_nobodys_parse(tmp_path):
    """Whoever may write in a folder that the table names could make one."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    loop = str(tmp_path / "loop")
    setting = table(**{str(tmp_path): {"paths": [f"{loop}/data"]}, loop: {"connections": ["x"]}})
    assert rights_of(setting, tmp_path).paths == (tmp_path / "loop" / "data",)


@pytest.mark.parametrize("links", [50, 1500])
def test_nor_does_a_chain_of_links(tmp_path, links):
    """``os.path.realpath`` of Python 3.11 calls itself for each; the kernel follows 40."""
    for number in range(links):
        (tmp_path / f"{number}").symlink_to(f"{number + 1}")
    (tmp_path / str(links)).mkdir()
    chain = str(tmp_path / "0")
    assert rights_of(table(**{chain: {"paths": [f"{chain}/a/../b"]}}), tmp_path) == Rights()


@pytest.fixture
def domain_of(tmp_path):
    """domain_of(table, path) -> of a manifest's folder below the folder ``dags``."""
    top = tmp_path / "dags"
    for name in (
        ".worktrees/1/vision/a",
        "guest/.real",
        "audio",
        "teams/guest/.w1",
        "teams/vision",
    ):
        (top / name).mkdir(parents=True)
    (tmp_path / "far" / "a").mkdir(parents=True)
    for name, to in {
        "repo": ".worktrees/1",
        "guest/jobs": ".real",
        "guest/out": "../audio",
        "guest/up": "../..",
        "far": tmp_path / "far",
        "farther": tmp_path,
        "teams/guest/l": ".w1",
        "teams/guest/up": "..",
        ".worktrees/1/up": "../..",
        ".worktrees/1/out": "../../audio",
    }.items():
        (top / name).symlink_to(to)

    def find(setting: str, path: str) -> str:
        found = RightsTable.read(setting)
        assert found is not None
        link = first_link(top, Path(path))
        return found.domain((top / path).resolve(), top, top / path, link)

    return find


def test_a_domain_is_an_entry_the_folder_of_the_link_or_a_folder_alone(tmp_path, domain_of):
    top, far = tmp_path / "dags", tmp_path / "far"
    vision = str(top / "repo" / "vision")
    entries = table(**{f"{vision}/": {}, str(far): {}, "/": {}, str(top): {}})
    assert domain_of(entries, "repo/vision/a") == vision
    assert domain_of(entries, "repo") == "./."
    assert domain_of(entries, "guest/jobs") == "./guest"
    assert domain_of(entries, "guest/out") == f"={top}/audio"
    assert domain_of(entries, "repo/up") == f"={top}"  # it is in what only the first link leads to
    assert domain_of(entries, "repo/out") == f"={top}/audio"
    assert domain_of(entries, "far/a") == str(far)
    assert domain_of(entries, "farther/far") == str(far)
    assert domain_of(table(**{vision: {}}), "far/a") == f"={far}/a"
    assert domain_of(table(**{"/": {}}), "far/a") == "/"
    assert domain_of(table(**{"/": {}}), "farther") == f"={tmp_path}"  # all manifests lie there


def test_no_link_makes_a_folder_of_others_a_manifests_own(tmp_path, domain_of):
    """As one to a folder above, of which parts are under entries of their own."""
    teams, repo = tmp_path / "dags" / "teams", tmp_path / "dags" / "repo"
    entries = table(**{str(teams): {}, str(teams / "vision"): {}})
    assert domain_of(entries, "teams/guest/l") == str(teams)
    assert domain_of(entries, "teams/guest/up") == f"={teams}"
    entries = table(**{str(teams): {}, str(teams / "guest" / ".w1" / "a"): {}})
    assert domain_of(entries, "teams/guest/l") == f"={teams}/guest/.w1"
    # The manifest at the top of a repository stands above all that is in there.
    entries = table(**{str(repo): {}, str(repo / "vision"): {}})
    assert domain_of(entries, "repo") == str(repo)


def test_of_two_entries_of_one_folder_that_without_links_counts(tmp_path):
    """Whoever owns a folder may make a link there, to a folder with an entry of its own."""
    (tmp_path / "guest").mkdir()
    (tmp_path / "vision").mkdir()
    (tmp_path / "guest" / "all").symlink_to("../vision")
    entries = {str(tmp_path / "vision"): {"connections": ["vision_s3"]}}
    for one in ({str(tmp_path / "guest" / "all"): {}} | entries, entries):
        entries |= {str(tmp_path / "guest" / "all"): {}}
        assert rights_of(table(**one), tmp_path / "vision") == Rights(("vision_s3",))


def test_a_table_whose_links_are_turned_while_a_manifest_is_read_is_read_again(tmp_path):
    """Else it would fall under a wider entry, between two states of a repository."""
    for commit in ("1", "2"):
        (tmp_path / commit / "guests").mkdir(parents=True)
    repo = tmp_path / "repo"
    repo.symlink_to("1")
    entries = {str(tmp_path): {"connections": ["*"]}, str(repo / "guests"): {}}
    turns = []

    def look() -> Path:
        if len(turns) < most:
            turns.append(repo.readlink().name)
            repo.unlink()
            repo.symlink_to("2" if turns[-1] == "1" else "1")
        return (repo / "guests").resolve()

    for most in (0, 1, 2):
        folder, found = looked_up(table(**entries), look, lambda found: [found], "m.yml")
        assert found is not None and found.of(folder) == Rights() and len(turns) == most
        turns.clear()
    most = 9
    with pytest.raises(ManifestError, match="m.yml: links on its path, or on those of .ddl. manif"):
        looked_up(table(**entries), look, lambda found: [found], "m.yml")


def test_connections_are_those_of_the_list(found):
    some = Rights(("team_*", "public"))
    for conn_id, allowed in (("team_a", True), ("public", True), ("other", False), ("TEAM_a", 0)):
        said = found(some, data=S3.format(conn_id, "source"))
        assert bool(said) is not bool(allowed)
    assert list(found(Rights(), results=S3.format("team_a", "target"))) == [
        "training_results_reference.connection.conn_id"
    ]
    said = found(some, data=S3.format("other", "source"))
    assert said["training_data_reference.connection.conn_id"].startswith(
        "'other' is not a connection for this manifest Its connections: team_*, public."
    )


@pytest.mark.parametrize(
    "conn_id",
    ["team_/../other", "team_%2F../other", "team_\\\\other", "other#team_", "other?team_"],
)
def test_a_pattern_is_of_ids_that_are_no_other_in_a_url(found, conn_id):
    """Airflow asks its API for `connections/<id>`."""
    patterns = Rights(("team_*", "*team_"))
    data = S3.format(json.dumps(conn_id), "source")
    (field,) = found(patterns, data=data)
    assert field == "training_data_reference.connection.conn_id"
    secret = f"parameters: {{a: {{secret: true, conn_id: {json.dumps(conn_id)}}}}}"
    assert list(found(patterns, more=secret)) == ["parameters.a"]
    assert found(Rights((conn_id,)), data=data) == {}  # the site's own word


KEYS = """{{type: s3, source: {{bucket: some-bucket}}, connection: {{{}
  access_key_id: "${{S3_ACCESS_KEY_ID}}", secret_access_key: "${{TEAM_KEY}}"}}}}"""


def test_variables_are_those_of_the_list(found):
    """Who may name a variable beside an endpoint may have its value sent there."""
    data = KEYS.format('endpoint_url: "http://guest-host",')
    at = "training_data_reference.connection"
    said = found(Rights(), data=data)
    assert list(said) == [f"{at}.access_key_id", f"{at}.secret_access_key"]
    assert said[f"{at}.access_key_id"] == (
        "${S3_ACCESS_KEY_ID} is not a variable for this manifest Its variables: none. Or ask the "
        "site's administrator for the right ([ddl] manifest_rights)."
    )
    assert list(found(Rights(variables=("S3_*",)), data=data)) == [f"{at}.secret_access_key"]
    assert found(Rights(variables=("TEAM_KEY", "S3_*")), data=data) == {}
    assert found(Rights(variables=("*",)), data=data) == {}
    assert found(None, data=data) == {}
    data = KEYS.format('endpoint_url: "${S3_ENDPOINT_URL}", region_name: "${team_key}",')
    said = found(Rights(variables=("TEAM_KEY", "S3_*_*")), data=data)
    assert list(said) == [f"{at}.region_name"]
    results = data.replace("source", "target")
    assert f"{at.replace('data', 'results')}.endpoint_url" in found(Rights(), results=results)


def test_files_of_a_launcher_are_in_its_folders(found, tmp_path):
    more = "launcher: {{kind: ssh, hostfile: {}, ssh_config: {}}}"
    key = more.format("/root/.ssh/id_rsa", "/etc/ddl/ssh_config")
    said = found(Rights(paths=(Path("/etc/ddl"),)), more=key)
    assert list(said) == ["launcher.hostfile"]
    assert "/root/.ssh/id_rsa is not a file for manifests in" in said["launcher.hostfile"]
    # ssh's configuration may name programs, which the worker would run.
    own = more.format(tmp_path / "team" / "hosts", tmp_path / "team" / "config")
    assert list(found(Rights(), more=own)) == ["launcher.ssh_config"]
    assert found(None, more=key) == {}


@pytest.mark.parametrize("conn_id", ["other", "team_{{ run_id }}"])
def test_so_are_those_of_notifiers(found, conn_id):
    more = (
        f"notifications: {{on_failure: [{{arguments: {{to: a@b.c, smtp_conn_id: '{conn_id}'}}}}]}}"
    )
    (said,) = found(Rights(("team_*",)), more=more)
    assert said == "notifications.on_failure[0].arguments.smtp_conn_id"


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        *((name, False) for name in ("base_url", "proxy", "host", "endpoint", "smtp_host")),
        *((name, True) for name in ("icon_url", "avatar_url", "queue_url", "ghost", "text")),
    ],
)
def test_where_a_notifier_sends_to_is_said_by_its_connection(found, argument, allowed):
    """What the connection holds, a token for one, would be sent to whom the manifest names."""
    slack = "airflow.providers.slack.notifications.slack.SlackNotifier"
    arguments = f"{{slack_conn_id: team_slack, {argument}: 'http://guest-host'}}"
    more = f"notifications: {{on_success: [{{notifier: {slack}, arguments: {arguments}}}]}}"
    said = found(Rights(("team_*",)), more=more)
    assert list(said) == ([] if allowed else [f"notifications.on_success[0].arguments.{argument}"])
    assert found(None, more=more) == {}


def test_so_are_those_of_secret_parameters(found):
    some = Rights(("team_*",))
    given = "{team_token: {secret: true}, key: {secret: true, conn_id: other}, rate: 1}"
    assert list(found(some, more=f"parameters: {given}")) == ["parameters.key"]


def test_so_are_those_of_launchers(found):
    some = Rights(("team_*",))
    for kind in ("{kind: ssh, connection: %s}", "{kind: kubernetes, image: a, connection: %s}"):
        assert found(some, more=f"launcher: {kind % 'team_hosts'}") == {}
        assert list(found(some, more=f"launcher: {kind % 'other'}")) == ["launcher.connection"]


def test_folders_are_the_manifests_own_or_listed_however_they_are_named(found, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    some = Rights(paths=(shared,))
    assert found(some) == {}
    assert found(some, data=f"{{type: fs, source: {{path: {shared}/mnist}}}}") == {}
    (tmp_path / "team" / "out").symlink_to("/etc")
    for path in (f"{tmp_path}/shared2", "/etc", "./out", "./out/ssl", "/"):
        said = found(some, data=f"{{type: fs, source: {{path: {path}}}}}")
        assert list(said) == ["training_data_reference.source.path"], path
        said = found(some, results=f"{{type: fs, target: {{path: {path}/x}}}}")
        assert list(said) == ["training_results_reference.target.path"], path


def test_code_that_is_a_link_out_of_the_folder_is_nobodys(found, tmp_path):
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "src").symlink_to("/etc")
    assert list(found(None, more="code: ./src")) == ["code"]


def test_launchers_are_those_of_the_list(found):
    assert found(Rights(launchers=("slurm", "local"))) == {}
    assert list(found(Rights(launchers=("slurm",)))) == ["launcher.kind"]
