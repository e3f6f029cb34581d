# SPDX-License-Identifier: Apache-2.0
"""The platform's class by itself."""

from vllm_platform_kit import hooks


def test_attributes(kit):
    kit.report(hooks.check_attributes(kit.target))


def test_every_override_is_of_a_hook(kit):
    kit.report(hooks.check_names(kit.target))


def test_overrides_are_called_as_the_base_is(kit):
    kit.report(hooks.check_overrides(kit.target))


def test_answers(kit):
    kit.report(hooks.check_answers(kit.target))
