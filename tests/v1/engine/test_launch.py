# SPDX-License-Identifier: Apache-2.0
"""An engine core process that is told to end before it has anything to serve."""

from __future__ import annotations

from vllm.v1.engine.launch import launch_engine_core


def test_shutdown_before_a_config(capfd):
    """A wrong argument or Ctrl-C while the config is made: the process goes by itself and without a
    word, not killed for having taken the word to end for a config."""
    process = launch_engine_core()
    process.shutdown()
    assert process._process.returncode == 0
    out, err = capfd.readouterr()
    assert "Traceback" not in err and out == ""
