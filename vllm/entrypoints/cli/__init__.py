# SPDX-License-Identifier: Apache-2.0
"""The `vllm` command: a module a subcommand, imported only when it is asked for."""
