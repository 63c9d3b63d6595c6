"""Ranks in pods of a Kubernetes cluster; ``launcher`` says which module does what."""

from ddl_airflow.launchers.kubernetes.launcher import KubernetesLauncher

__all__ = ["KubernetesLauncher"]
