"""Asks a Kubernetes API server, each question with a time limit, and answers as JSON.

The package ``kubernetes`` finds the server and the credentials, as kubectl does; what it would make
of the objects is left alone: it knows one version of them, and refuses others.
"""

from __future__ import annotations

import base64
import copy
import json
import os
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
        by = f"connection {connection.conn_id!r}" if connection else "the kubeconfig"
        # It has no types that hold from one of its versions to the next.
        loading: Any = config
        self._config: Any = client.Configuration()
        # Of keys that were in files for the moment in which it was made.
        self._tls: ssl.SSLContext | None = None
        try:
            if connection is not None:
                self._by_connection(loading, context, connection)
            elif (files := _kubeconfig()) or context:
                self.context, self.namespace = _context_of(files, context)
                loading.load_kube_config(
                    config_file=files,
                    context=self.context,
                    client_configuration=self._config,
                    persist_config=False,
                )
            else:
                loading.load_incluster_config(client_configuration=self._config)
                self.context, self.namespace = "", _IN_POD.read_text("utf-8").strip()
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
        self._no_credentials = config.ConfigException, self._errors, OSError, *DAMAGED
        tls: dict[str, Any] = {
            "ca_certs": self._config.ssl_ca_cert,
            "cert_file": self._config.cert_file,
            "key_file": self._config.key_file,
            "cert_reqs": "CERT_REQUIRED" if self._config.verify_ssl else "CERT_NONE",
            "server_hostname": getattr(self._config, "tls_server_name", None),
        }
        if self._tls is not None:
            tls = {"ssl_context": self._tls, "server_hostname": tls["server_hostname"]}
        settings: dict[str, Any] = {name: one for name, one in tls.items() if one}
        settings["timeout"] = urllib3.Timeout(connect=_CONNECT_S, read=_READ_S)
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
            loading.load_incluster_config(client_configuration=self._config)
            self.context, self.namespace = "", _IN_POD.read_text("utf-8").strip()
        else:
            told = _kubeconfig_of(connection, name)
            with tempfile.TemporaryDirectory(dir=usual_base(), prefix="ddl-kubeconfig-") as folder:
                loading.load_kube_config_from_dict(
                    _with_files(told, Path(folder), name),
                    context=context or None,
                    client_configuration=self._config,
                    persist_config=False,
                )
                if self._config.host.startswith("https:"):
                    self._tls = _tls_of(self._config)
            self.context = str(context or told["current-context"])
            contexts = {one["name"]: one["context"] for one in told["contexts"]}
            self.namespace = contexts[self.context].get("namespace") or "default"
        self.namespace = connection.text("namespace") or self.namespace

    def create(self, namespace: str, one: Mapping[str, Any]) -> dict[str, Any]:
        """The object as the server keeps it."""
        return self._object(self._ask("POST", _path(namespace, one["kind"]), one))

    def read(self, namespace: str, kind: str, name: str) -> dict[str, Any] | None:
        """The object; None if there is none of that name."""
        try:
            return self._object(self._ask("GET", f"{_path(namespace, kind)}/{name}"))
        except Refused as refused:
            if self._is_absent(refused):
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
            if refused.code != 409 and not self._is_absent(refused):
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

    def _is_absent(self, refused: Refused) -> bool:
        """Whether there is no such object; raises for a 404 that need not be Kubernetes' own."""
        if refused.code == 404 and refused.reason != "NotFound":
            raise self._other("HTTP status 404 and no reason") from refused
        return refused.code == 404

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
            return error.code == 401
        about = self._config
        files = (about.ssl_ca_cert, about.cert_file, about.key_file) if self._tls is None else ()
        return any(one and not os.path.exists(one) for one in files)

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
    return told


def _with_files(kubeconfig: Mapping[str, Any], folder: Path, whose: str) -> dict[str, Any]:
    """The kubeconfig with files in place of certificates and keys that are written into it.

    Args:
        kubeconfig: as it was entered.
        folder: for the files.
        whose: it is, for messages.
    """
    told = copy.deepcopy(dict(kubeconfig))
    for kind in ("cluster", "user"):
        for entry in told.get(f"{kind}s") or ():
            about = entry.get(kind) or {}
            for name in [one for one in about if one.endswith("-data")]:
                try:
                    said = base64.b64decode(about.pop(name))
                except (ValueError, TypeError) as error:
                    which = f"{name} of {kind} {entry['name']!r}"
                    raise ConnectionInvalid(f"{whose}: {which} is not Base64") from error
                path = folder / f"{kind}-{entry['name']}-{name}".replace("/", "-")
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(file, "wb") as opened:
                    opened.write(said)
                about[name.removesuffix("-data")] = str(path)
    return told


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


def _context_of(files: str, context: str) -> tuple[str, str]:
    """The name of the context, the current one where none is asked for, and its namespace."""
    from kubernetes.config import ConfigException, kube_config

    if not files:
        raise ConfigException(f"context {context!r} is asked for, and there is no kubeconfig here")
    # Not list_kube_config_contexts: that takes no files whose current context is not there.
    told = kube_config.KubeConfigMerger(files).config
    loader: Any = kube_config.KubeConfigLoader(told, active_context=context or None)
    chosen = loader.current_context
    return str(chosen["name"]), str(chosen["context"].get("namespace") or "default")
