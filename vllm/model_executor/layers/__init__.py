# SPDX-License-Identifier: Apache-2.0
"""The layers that models are built of."""
