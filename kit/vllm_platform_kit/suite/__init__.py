# SPDX-License-Identifier: Apache-2.0
"""The checks. Each is given the platform by the fixture `kit`; none passes that did not run."""
