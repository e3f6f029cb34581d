# SPDX-License-Identifier: Apache-2.0
"""What a release of upstream has of this project's public names, found by importing both."""
