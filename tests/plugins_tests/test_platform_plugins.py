# SPDX-License-Identifier: Apache-2.0
"""Which platform a process gets when packages bring platforms of their own."""

from __future__ import annotations

PLATFORMS = "vllm.platform_plugins"
WHICH = "from vllm.platforms import current_platform; print(type(current_platform).__name__)"
PLATFORM_MODULE = """
    from vllm.platforms import Platform, PlatformEnum

    class {name}(Platform):
        _enum = PlatformEnum.OOT
        device_name = "{name}"
        device_type = "cpu"

    def register():
        return "{module}.{name}"
"""
ABSENT = "def register(): return None"
RAISES = "def register(): raise OSError('libabacus.so is missing')"


def add_platform(site, name: str) -> None:
    source = PLATFORM_MODULE.format(name=name.capitalize(), module=f"plugin_{name}")
    site.add(name, PLATFORMS, source)


def test_a_plugin_wins_over_the_built_in_ones(site):
    """Its author installed it for this machine; the CPU is always there."""
    add_platform(site, "abacus")
    assert site.output(WHICH) == "Abacus"


def test_a_built_in_platform_asked_for_loses_aloud(site):
    """Images set VLLM_TARGET_DEVICE; an installed plugin wins all the same, and the log says so."""
    add_platform(site, "abacus")
    done = site.run(WHICH, VLLM_TARGET_DEVICE="cpu")
    assert done.stdout.strip() == "Abacus"
    assert "VLLM_TARGET_DEVICE=cpu has no effect" in done.stderr and "VLLM_PLUGINS" in done.stderr


def test_absent_hardware_is_not_an_error(site):
    """`register()` returning None is how a plugin says that its hardware is not here."""
    site.add("abacus", PLATFORMS, ABSENT)
    done = site.run(WHICH)
    assert (done.stdout.strip(), done.stderr) == ("CpuPlatform", "")


def test_absent_hardware_asked_for_by_name(site):
    """Running on another device than the one asked for would go unnoticed."""
    site.add("abacus", PLATFORMS, ABSENT)
    error = site.last_error(WHICH, VLLM_TARGET_DEVICE="abacus")
    assert "VLLM_TARGET_DEVICE=abacus" in error and "no such hardware" in error


def test_register_that_raises_is_warned_about(site):
    """A broken plugin must neither stop other platforms nor vanish without a word."""
    site.add("abacus", PLATFORMS, RAISES)
    done = site.run(WHICH)
    assert done.stdout.strip() == "CpuPlatform"
    assert "'abacus'" in done.stderr and "OSError: libabacus.so is missing" in done.stderr


def test_module_that_cannot_be_imported_is_warned_about(site):
    """The commonest breakage: a vendor library that the plugin's module imports is missing."""
    site.add("abacus", PLATFORMS, "import no_such_vendor_library\ndef register(): return None")
    done = site.run(WHICH)
    assert done.stdout.strip() == "CpuPlatform"
    assert "'abacus'" in done.stderr and "no_such_vendor_library" in done.stderr


def test_register_that_raises_is_an_error_if_asked_for(site):
    """Both ways of asking by name; falling back to the CPU would serve a hundred times slower."""
    site.add("abacus", PLATFORMS, RAISES)
    for env in ({"VLLM_PLUGINS": "abacus"}, {"VLLM_TARGET_DEVICE": "abacus"}):
        error = site.last_error(WHICH, **env)
        assert "'abacus'" in error and "libabacus.so is missing" in error
        assert f"{next(iter(env))} asks for it" in error


def test_two_active_platforms(site):
    """There is no sane choice: both are named, and the setting that chooses."""
    add_platform(site, "abacus")
    add_platform(site, "quipu")
    error = site.last_error(WHICH)
    assert "abacus, quipu" in error and "VLLM_PLUGINS" in error
    assert site.output(WHICH, VLLM_PLUGINS="quipu") == "Quipu"
    assert site.output(WHICH, VLLM_TARGET_DEVICE="Abacus") == "Abacus"


def test_empty_vllm_plugins_loads_none(site):
    """The way back to the built-in platform without uninstalling anything."""
    add_platform(site, "abacus")
    assert site.output(WHICH, VLLM_PLUGINS="") == "CpuPlatform"


def test_broken_beside_active(site):
    """One vendor's broken package must not take another's platform down."""
    site.add("broken", PLATFORMS, RAISES)
    add_platform(site, "abacus")
    done = site.run(WHICH)
    assert done.stdout.strip() == "Abacus" and "'broken'" in done.stderr


def test_name_that_is_no_platform_class(site):
    """A typing error in the dotted name must say whose it is."""
    site.add("abacus", PLATFORMS, "def register(): return 'plugin_abacus.Abacsu'")
    assert "plugin_abacus.Abacsu cannot be imported" in site.last_error(WHICH)
    site.add("quipu", PLATFORMS, "def register(): return 'plugin_quipu.register'")
    error = site.last_error(WHICH, VLLM_PLUGINS="quipu")
    assert "plugin_quipu.register is not a subclass of vllm.platforms.Platform" in error


def test_register_that_returns_the_class_itself(site):
    """A likely mistake; the class would be imported before the platform is chosen."""
    site.add("abacus", PLATFORMS, "def register(): return object")
    done = site.run(WHICH)
    assert done.stdout.strip() == "CpuPlatform"
    assert "'abacus'" in done.stderr and "not a dotted class name or None" in done.stderr


def test_class_without_the_required_attributes(site):
    """Said when the platform is resolved, not by an AttributeError somewhere in the engine."""
    source = """
        from vllm.platforms import Platform, PlatformEnum

        class Abacus(Platform):
            _enum = PlatformEnum.OOT

        def register():
            return "plugin_abacus.Abacus"
    """
    site.add("abacus", PLATFORMS, source)
    assert "plugin_abacus.Abacus must set device_name, device_type" in site.last_error(WHICH)


def test_resolution_waits_for_first_use(site):
    """`vllm --help` must not wake a device: an import resolves nothing, a process once."""
    site.add("abacus", PLATFORMS, "def register(): print('registered')")
    code = "import vllm, vllm.platforms, vllm.platforms.cpu, vllm.config"
    assert site.output(code) == ""
    use = "from vllm.platforms import current_platform"
    assert site.output(f"{code}\n{use}\n{use}\nimport vllm.platforms as p\np.current_platform") == (
        "registered"
    )


def test_use_during_resolution_is_explained(site):
    """A plugin whose module uses `current_platform` at import would recurse without end."""
    source = """
        from vllm.platforms import current_platform

        def register():
            return None
    """
    site.add("abacus", PLATFORMS, source)
    done = site.run(WHICH)
    assert done.stdout.strip() == "CpuPlatform"
    assert "'abacus'" in done.stderr and "while it is being resolved" in done.stderr
