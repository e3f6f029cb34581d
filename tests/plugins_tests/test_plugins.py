# SPDX-License-Identifier: Apache-2.0
"""Loading plugins: once a process, whatever they do, and only those that are admitted."""

from __future__ import annotations

import pytest

GENERAL = "vllm.general_plugins"
LOAD = "from vllm.plugins import load_general_plugins as load"


def test_called_once_in_a_process(site):
    """Every worker and front end loads them; registering a model twice warns or fails."""
    site.add("one", GENERAL, "def register(): print('called')")
    assert site.output(f"{LOAD}\nload(); load()") == "called"


def test_reentrant(site):
    """A plugin that imports vllm's engine ends up loading plugins again, from inside."""
    source = f"""
        {LOAD}

        def register():
            print("called")
            load()
    """
    site.add("one", GENERAL, source)
    assert site.output(f"{LOAD}\nload()") == "called"


def test_other_threads_wait(site):
    """A thread that returned early would look a model up that is not registered yet."""
    source = """
        import time

        DONE = []

        def register():
            time.sleep(0.3)
            DONE.append(True)
    """
    site.add("slow", GENERAL, source)
    code = f"""
        import threading
        {LOAD}

        seen = []

        def use():
            load()
            import plugin_slow
            seen.append(list(plugin_slow.DONE))

        threads = [threading.Thread(target=use) for _ in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(seen)
    """
    assert site.output(code) == str([[True]] * 4)


def test_one_that_raises_stops_no_other(site):
    """Named with its cause; the rest is loaded."""
    site.add("bad", GENERAL, "def register(): raise KeyError('no such layer')")
    site.add("good", GENERAL, "def register(): print('called')")
    done = site.run(f"{LOAD}\nload()")
    assert (done.returncode, done.stdout.strip()) == (0, "called")
    assert "'bad'" in done.stderr and "KeyError: 'no such layer'" in done.stderr


def test_one_that_raises_is_an_error_if_asked_for(site):
    """A user who names a plugin cannot do without it."""
    site.add("bad", GENERAL, "def register(): raise KeyError('no such layer')")
    error = site.last_error(f"{LOAD}\nload()", VLLM_PLUGINS="bad")
    assert "'bad'" in error and "no such layer" in error and "VLLM_PLUGINS" in error


def test_vllm_plugins_limits_by_name(site):
    """Unset: all; a list: these; empty: none."""
    for name in ("one", "two"):
        site.add(name, GENERAL, f"def register(): print('{name}')")
    code = f"{LOAD}\nload()"
    assert sorted(site.output(code).split()) == ["one", "two"]
    assert site.output(code, VLLM_PLUGINS="two") == "two"
    assert site.output(code, VLLM_PLUGINS="") == ""


def test_a_name_that_nothing_bears_is_warned_about(site):
    """A misspelt VLLM_PLUGINS turns every plugin off."""
    site.add("one", GENERAL, "def register(): pass")
    done = site.run(f"{LOAD}\nload()", VLLM_PLUGINS="oen")
    assert "names oen" in done.stderr and "installed: one" in done.stderr


def test_two_packages_with_one_name(site):
    """Only one of them can be meant: the log says which was taken."""
    site.add("one", GENERAL, "def register(): print('first')")
    site._write_metadata("other", {GENERAL: {"one": "plugin_other:register"}})
    (site.folder / "plugin_other.py").write_text("def register(): print('second')")
    done = site.run(f"{LOAD}\nload()")
    assert done.stdout.strip() in ("first", "second")
    assert "two plugins" in done.stderr and "plugin_other:register" in done.stderr


@pytest.mark.parametrize(
    ("group", "default"),
    [
        ("vllm.stat_logger_plugins", "['one']"),
        ("vllm.io_processor_plugins", "['one']"),
        ("vllm.endpoint_plugins", "[]"),
    ],
)
def test_groups(site, group, default):
    """Endpoint plugins open HTTP routes: installing a package must not be enough."""
    site.add("one", group, "def register(): raise RuntimeError('must not be called')")
    code = f"from vllm.plugins import load_plugins_by_group as by; print(list(by({group!r})))"
    assert site.output(code) == default
    assert site.output(code, VLLM_PLUGINS="one") == "['one']"


def test_loading_imports_no_torch(site):
    """The command line loads plugins before it knows whether it needs a model."""
    site.add("one", GENERAL, "def register(): pass")
    assert site.output(f"import sys\n{LOAD}\nload()\nprint('torch' in sys.modules)") == "False"
