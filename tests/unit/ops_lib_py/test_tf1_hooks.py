from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from ddl_ops.tf1_hooks import session_config  # noqa: E402


def test_session_shows_one_gpu_and_grows() -> None:
    config = session_config(None, 2)
    assert config.gpu_options.visible_device_list == "2"
    assert config.gpu_options.allow_growth


def test_session_keeps_the_scripts_settings() -> None:
    own = tf.compat.v1.ConfigProto(allow_soft_placement=True, inter_op_parallelism_threads=3)
    config = session_config(own, 1)
    assert config.allow_soft_placement and config.inter_op_parallelism_threads == 3
    assert config.gpu_options.visible_device_list == "1"
    assert own.gpu_options.visible_device_list == ""  # a copy


def test_gpu_chosen_by_the_script_stays() -> None:
    own = tf.compat.v1.ConfigProto()
    own.gpu_options.visible_device_list = "0"
    assert session_config(own, 3).gpu_options.visible_device_list == "0"
