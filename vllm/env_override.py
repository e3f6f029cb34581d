# SPDX-License-Identifier: Apache-2.0
"""Settings of other libraries that they read from the environment when they are loaded.

Imported by `vllm` first of all. Without effect if torch was imported before; a user's own setting
is kept.
"""

from __future__ import annotations

import os

# torch's OpenMP threads wait for each other by spinning, for about 5 ms unless told otherwise. A
# forward pass on a CPU has hundreds of short parallel regions; where another process wants a core
# (the API server does), every one of them would spin away the time slice its peer needs.
_SPINS = "1000"

# Names set here, not by the user: a process that runs another library's engine takes them back.
changed: list[str] = []

if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
    os.environ["GOMP_SPINCOUNT"] = _SPINS
    changed.append("GOMP_SPINCOUNT")
