"""Asks a Kubernetes API server, each question with a time limit, and answers as JSON.

The package ``kubernetes`` finds the server and the credentials, as kubectl does; what it would make
of the objects is left alone: it knows one version of them, and refuses others.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import DAMAGED, ConnectionInvalid, LaunchError, SubmitFailed
from ddl_airflow.launchers.session_directory import usual_base

_CONNECT_S, _READ_S = 10.0, 30.0
# In which a kubeconfig's plugin must give the credentials.
_PLUGIN_S = 60.0
_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PAGE = 500
_PATHS = {
    "Job": "apis/batch/v1/namespaces/{}/jobs",
    "Pod": "api/v1/namespaces/{}/pods",
    "Service": "api/v1/namespaces/{}/services",
    "Secret": "api/v1/namespaces/{}/secrets",
    "ConfigMap": "api/v1/namespaces/{}/configmaps",
    "Event": "api/v1/namespaces/{}/events",
    "MPIJob": "apis/kubeflow.org/v2beta1/namespaces/{}/mpijobs",
    "TrainJob": "apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs",
    "TrainingRuntime": "apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainingruntimes",
}
_HOW_TO_REACH = (
    "Tasks and triggerer need a kubeconfig, ~/.kube/config or what KUBECONFIG names, or run in a "
    "pod of the cluster with a service account; docs/kubernetes.md"
)


class Refused(LaunchError):
    """The API server answered that it does not do it.

    Attributes:
        code: of HTTP.
        reason: the server's word for it, such as ``AlreadyExists``.
        said: its sentence.
    """

    def __init__(self, code: int, reason: str, said: str) -> None:
        # A server that is overloaded, that is just being replaced, or that forgot the rest of a
        # list (410) is asked again; so is one where somebody else has changed, in that moment, what
        # the object counts for: a quota.
        passes = code >= 500 or code in (410, 429) or reason == "Conflict"
        super().__init__(f"Kubernetes' API server: {said.rstrip('.')}.", retryable=passes)
        self.code = code
        self.reason = reason
        self.said = said


class Cluster:
    """One API server, and whom it takes us for.

    Args:
        context: of the kubeconfig; empty for its current one, or for the pod's own cluster.
        connection: an Airflow connection of type ``kubernetes`` that has the kubeconfig; None: it
            is where kubectl finds it.

    Attributes:
        context: by which it was found; empty for the pod's own cluster.
        namespace: where nobody says another.

    Raises:
        SubmitFailed: the package ``kubernetes`` is missing, or there is no way to reach a cluster.
        LaunchError: who is to give the credentials has not, this time.
    """

    def __init__(self, context: str = "", connection: AirflowConnection | None = None) -> None:
        try:
            import urllib3
            import yaml
            from kubernetes import client, config
            from requests.utils import should_bypass_proxies
        except ImportError as error:
            raise SubmitFailed(
                f"the Python package {error.name} is missing where this task or trigger runs. "
                "Install it there: the extra `kubernetes` of ddl-airflow",
                retryable=False,
            ) from error
        self._made_by = context, connection
        self.context, self.namespace = "", ""
        by = f"connection {connection.conn_id!r}" if connection else "the kubeconfig"
        # It has no types that hold from one of its versions to the next.
        loading: Any = config
        self._config: Any = client.Configuration()
        # None: it is reached by plain HTTP.
        self._tls: ssl.SSLContext | None = None
        try:
            if connection is not None:
                self._by_connection(loading, context, connection)
            elif (files := _kubeconfig()) or context:
                self._by_kubeconfig(_merged(files, context), context, by)
            else:
                self._by_pod(loading)
        except config.ConfigException as error:
            raise _cannot_reach(f"{by}: {error}") from error
        except (ConnectionInvalid, OSError) as error:
            raise _cannot_reach(str(error)) from error
        except yaml.YAMLError as error:  # which quotes it, and it has keys
            mark = getattr(error, "problem_mark", None)
            line = f" (line {mark.line + 1})" if mark else ""
            raise _cannot_reach(f"the kubeconfig is no YAML{line}") from None
        except DAMAGED as error:
            raise _cannot_reach(f"{by} is malformed ({type(error).__name__})") from error
        self._errors = urllib3.exceptions.HTTPError
        self._not_trusted = urllib3.exceptions.SSLError
        self._no_credentials = config.ConfigException, self._errors, OSError, *DAMAGED
        settings: dict[str, Any] = {"timeout": urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)}
        if self._tls is not None:
            settings["ssl_context"] = self._tls
            if name := getattr(self._config, "tls_server_name", None):
                settings["server_hostname"] = name
        proxy, none = self._config.proxy, getattr(self._config, "no_proxy", None) or ""
        if proxy and should_bypass_proxies(self._config.host, no_proxy=none):  # as kubectl does
            proxy = None
        self._pool: Any = (
            urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
        )

    def has(self, version: str) -> set[str]:
        """The resources that it has of a version of a group; none where it knows no such version.

        Args:
            version: such as ``batch/v1``.
        """
        try:
            told = self._ask("GET", f"apis/{version}")
        except Refused as refused:
            if refused.code == 404:
                return set()
            raise
        try:
            return {str(one["name"]) for one in told.get("resources", ())}
        except DAMAGED as error:
            raise self._other("no list of resources") from error

    def _by_connection(self, loading: Any, context: str, connection: AirflowConnection) -> None:
        name = f"connection {connection.conn_id!r}"
        if connection.conn_type != "kubernetes":
            raise ConnectionInvalid(f"{name} is of type {connection.conn_type!r}, not kubernetes")
        if connection.is_set("disable_verify_ssl"):
            raise ConnectionInvalid(
                f"{name} has disable_verify_ssl, and the server's certificate is checked. Take it "
                "out, and have the server's authority in the kubeconfig"
            )
        context = context or connection.text("cluster_context")
        if connection.is_set("in_cluster"):
            self._by_pod(loading)
        else:
            self._by_kubeconfig(_kubeconfig_of(connection, name), context, name)
        self.namespace = connection.text("namespace") or self.namespace

    def _by_pod(self, loading: Any) -> None:
        loading.load_incluster_config(client_configuration=self._config)
        self.context, self.namespace = "", _IN_POD.read_text("utf-8").strip()
        self._tls = _tls_of(self._config)

    def _by_kubeconfig(self, told: Any, context: str, whose: str) -> None:
        """Keys are in files for this moment only: a task of Airflow ends without ``atexit``.

        Args:
            told: the kubeconfig, as somebody entered it or as the package has merged it; changed.
            context: as ``__init__`` has it.
            whose: it is, for messages.
        """
        from kubernetes.config import kube_config

        with tempfile.TemporaryDirectory(dir=usual_base(), prefix="ddl-kubeconfig-") as folder:
            loader: Any = kube_config.KubeConfigLoader(
                told,
                active_context=context or None,
                config_base_path=None,  # what it names is beside the file that names it
                temp_file_path=folder,
            )
            self.context = str(loader.current_context["name"])
            chosen = loader.current_context["context"]
            self.namespace = str(chosen.get("namespace") or "default")
            user = _named(told, "user", chosen.get("user"))
            cluster = _named(told, "cluster", chosen["cluster"])
            who = f"{whose}: user {chosen.get('user')!r}"
            plugin = user.get("exec") or {}
            _with_files(user, Path(folder), who)
            if not plugin.get("provideClusterInfo"):  # else it is told of it, as it is written
                _with_files(cluster, Path(folder), f"{whose}: cluster {chosen['cluster']!r}")
            if plugin:
                user["exec"] = _limited(plugin, who)
            loader.load_and_set(self._config)
            given = bool(self._config.api_key or self._config.cert_file)
            try:
                if self._config.host.startswith("https:"):
                    self._tls = _tls_of(self._config)
            except OSError:
                # The package has one file for all threads to which a plugin gives the same key.
                if not plugin or not self._config.cert_file:
                    raise
                given = False
            if plugin and not given:  # which the package only logs: it would ask as nobody
                raise LaunchError(
                    f"{who}: the credential plugin {plugin['command']!r} gave no credentials "
                    f"within {_PLUGIN_S:g} s. The log before this has its own words, if it had "
                    "any. The jobs there may run on."
                )

    def create(self, namespace: str, one: Mapping[str, Any]) -> dict[str, Any]:
        """The object as the server keeps it."""
        return self._object(self._ask("POST", _path(namespace, one["kind"]), one))

    def read(self, namespace: str, kind: str, name: str) -> dict[str, Any] | None:
        """The object; None if there is none of that name."""
        try:
            return self._object(self._ask("GET", f"{_path(namespace, kind)}/{name}"))
        except Refused as refused:
            if self._is_absent(refused, kind):
                return None
            raise

    def patch(self, namespace: str, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """Merges the change into the object."""
        self._ask("PATCH", f"{_path(namespace, kind)}/{name}", change)

    def delete(self, namespace: str, kind: str, name: str, uid: str) -> None:
        """Deletes that very object, and before it all that it owns; nothing if it is gone."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        try:
            self._ask("DELETE", f"{_path(namespace, kind)}/{name}", body)
        except Refused as refused:
            # 409: another one has that name by now.
            if refused.code != 409 and not self._is_absent(refused, kind):
                raise

    def list(self, namespace: str, kind: str, **query: str) -> list[dict[str, Any]]:
        """All objects of the kind that the query, such as ``labelSelector``, selects."""
        found: list[dict[str, Any]] = []
        more, anew = "", False
        while True:
            asked = {"limit": str(_PAGE), **query, **({"continue": more} if more else {})}
            try:
                answer = self._ask("GET", _path(namespace, kind), query=asked)
            except Refused as refused:
                if refused.code != 410 or not more or anew:
                    raise
                found, more, anew = [], "", True  # the server keeps the rest for some minutes
                continue
            try:
                found += map(self._object, answer["items"] or ())
                more = (answer.get("metadata") or {}).get("continue", "")
            except DAMAGED as error:
                raise self._other(f"no list of {kind}s") from error
            if not more:
                return found

    def _is_absent(self, refused: Refused, kind: str) -> bool:
        """Whether there is no such object; raises for a 404 that need not be Kubernetes' own."""
        if refused.code == 404 and refused.reason != "NotFound" and not self._lacks(kind):
            raise self._other("HTTP status 404 and no reason") from refused
        return refused.code == 404

    def _lacks(self, kind: str) -> bool:
        """Whether the server lists what it has, and this kind of an operator is not among it.

        It gives no reason where a definition, and all objects with it, has been removed.
        """
        *way, resource = _path("", kind).split("/")
        version = "/".join(way[1:3])
        if "." not in version.partition("/")[0]:  # every cluster has it
            return False
        try:
            groups = self._ask("GET", "apis")
            if groups["kind"] != "APIGroupList":
                return False
            known = {one["groupVersion"] for group in groups["groups"] for one in group["versions"]}
            if version not in known:
                return True
            told = self._ask("GET", f"apis/{version}")
            names = {one["name"] for one in told["resources"]}
        except (Refused, *DAMAGED):
            return False
        return told.get("kind") == "APIResourceList" and resource not in names

    def _object(self, one: Any) -> dict[str, Any]:
        """What is one of the server's; raises for what is none, and would be found out late."""
        about = one.get("metadata") if isinstance(one, dict) else None
        if not isinstance(about, dict) or "name" not in about:
            raise self._other("no object of Kubernetes")
        return dict(one)

    def _other(self, what: str) -> LaunchError:
        return LaunchError(
            f"Kubernetes' API server {self._config.host} answers with {what}, as a proxy does that "
            "has answers of its own. The jobs there may run on."
        )

    def _ask(self, method: str, path: str, *words: Any, **more: Any) -> dict[str, Any]:
        """As ``_ask_once``; once more where the credentials may have been renewed meanwhile."""
        try:
            return self._ask_once(method, path, *words, **more)
        except LaunchError as error:
            if not self._is_stale(error):
                raise
        # At once: another thread may be asking.
        vars(self).update(vars(Cluster(*self._made_by)))
        return self._ask_once(method, path, *words, **more)

    def _is_stale(self, error: LaunchError) -> bool:
        if isinstance(error, Refused):
            return error.code == 401 or (error.code == 403 and "system:anonymous" in error.said)
        return isinstance(error.__cause__, self._not_trusted)

    def _ask_once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        try:  # which renews them
            for one in self._config.auth_settings().values():
                headers[one["key"]] = one["value"]
        except self._no_credentials as error:
            raise LaunchError(
                f"what Kubernetes' API server {self._config.host} is to be asked with cannot be "
                f"renewed ({type(error).__name__}). The jobs there may run on."
            ) from error
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        url = f"{self._config.host.rstrip('/')}/{path}"
        if query:
            url = f"{url}?{urlencode(query)}"
        try:
            answer = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                retries=False,
            )
        except self._errors as error:
            raise LaunchError(
                f"Kubernetes' API server {self._config.host} does not answer "
                f"({type(error).__name__}). The jobs there may run on."
            ) from error
        except ValueError:  # which quotes it
            raise LaunchError(
                f"Kubernetes' API server {self._config.host} cannot be asked with what the "
                "kubeconfig says: its token has characters that no request may have, such as a "
                "line's end. Take them out.",
                retryable=False,
            ) from None
        told = _json(answer.data)
        if answer.status < 300 and told:
            return told
        if answer.status < 400:
            raise LaunchError(
                f"Kubernetes' API server {self._config.host} answers with no JSON object (HTTP "
                f"status {answer.status}), as a proxy or a page to log in does. The jobs there "
                "may run on."
            )
        said = str(told.get("message") or f"HTTP status {answer.status}")
        raise Refused(answer.status, str(told.get("reason", "")), said)


def _cannot_reach(why: str) -> SubmitFailed:
    message = f"cannot reach a Kubernetes cluster: {why}. {_HOW_TO_REACH}"
    return SubmitFailed(message, retryable=False)


def _path(namespace: str, kind: str) -> str:
    return _PATHS[kind].format(namespace)


def _json(data: bytes) -> dict[str, Any]:
    try:
        told = json.loads(data)
    except ValueError:  # of a proxy
        return {}
    return told if isinstance(told, dict) else {}


def _kubeconfig_of(connection: AirflowConnection, name: str) -> dict[str, Any]:
    import yaml

    said: Any = connection.extra.get("kube_config")
    try:
        if not said and (path := connection.text("kube_config_path")):
            said = Path(path).expanduser().read_text("utf-8")
        told = yaml.safe_load(said) if isinstance(said, str) else said
    except (yaml.YAMLError, UnicodeDecodeError):
        told = None  # not what was wrong with it: it has keys
    if not isinstance(told, dict):
        raise ConnectionInvalid(
            f"{name} has no kubeconfig. Enter it as kube_config, or kube_config_path or in_cluster"
        )
    return copy.deepcopy(told)


def _merged(files: str, context: str) -> Any:
    """The kubeconfig of these files, as the package has it: what is in it knows its file."""
    from kubernetes.config import ConfigException, kube_config

    if not files:
        raise ConfigException(f"context {context!r} is asked for, and there is no kubeconfig here")
    # The package's messages name an entry by all that is in it, and there are keys.
    try:
        merged: Any = kube_config.KubeConfigMerger(files).config
    except ConfigException as error:
        raise ConfigException(str(error).partition("{")[0]) from None
    for kind in ("clusters", "contexts", "users"):
        for one in merged.value[kind]:
            one.name = f"{one.path}: {kind}"
    return merged


def _named(told: Any, kind: str, name: Any) -> dict[str, Any]:
    """What a kubeconfig says of the cluster, or the user, of that name; to be changed."""
    for one in getattr(told, "value", told).get(f"{kind}s") or ():
        entry = getattr(one, "value", one)
        if entry["name"] == name:
            about: dict[str, Any] = entry[kind]
            return about
    return {}


def _with_files(about: dict[str, Any], folder: Path, whose: str) -> None:
    """Puts files in place of certificates and keys that are written into a part of a kubeconfig.

    Args:
        about: what it says of a cluster or a user.
        folder: for the files.
        whose: it is, for messages.
    """
    for name in [one for one in about if one.endswith("-data")]:
        try:
            said = base64.b64decode(about.pop(name) or "")
        except (ValueError, TypeError) as error:
            raise ConnectionInvalid(f"{whose}: {name} is not Base64") from error
        if said:
            file, path = tempfile.mkstemp(dir=folder)  # of mode 600
            with open(file, "wb") as opened:
                opened.write(said)
            about[name.removesuffix("-data")] = path


def _limited(plugin: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """What a kubeconfig says of a credential plugin, such that it ends in time.

    The package waits for it without end, and so do all who are to ask after that.
    """
    command = str(plugin["command"])
    path = {one["name"]: one["value"] for one in plugin.get("env") or ()}.get("PATH")
    beside = os.sep in command and not os.path.isabs(command)  # the kubeconfig
    if not beside and shutil.which(command, path=path) is None:
        raise ConnectionInvalid(f"{whose}: the credential plugin {command!r} is not there")
    # The plugin may have another PATH, and a service one without it.
    timeout = shutil.which("timeout") or shutil.which("timeout", path=os.defpath)
    if timeout is None or os.isatty(0):  # it may ask somebody
        return dict(plugin)
    limit = ["-s", "KILL", f"{_PLUGIN_S:g}", command]
    return {**plugin, "command": timeout, "args": [*limit, *(plugin.get("args") or ())]}


def _tls_of(config: Any) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=config.ssl_ca_cert)
    if not config.verify_ssl:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if config.cert_file:
        made.load_cert_chain(config.cert_file, config.key_file)
    return made


def _kubeconfig() -> str:
    """The files that kubectl would read; empty if there is none."""
    named = os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)
    paths = [Path(one).expanduser() for one in named if one]
    return os.pathsep.join(str(one) for one in paths if one.is_file())
