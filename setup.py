# SPDX-License-Identifier: Apache-2.0
"""For tools that still look for a setup.py: pyproject.toml has everything, nothing is compiled."""

from setuptools import setup

setup()
