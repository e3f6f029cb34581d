# SPDX-License-Identifier: Apache-2.0
"""Records of a program and of the threads that help with it: byte offsets of int64 words. What
several threads write lies on cache lines of its own.
"""

from __future__ import annotations

# Both: how a thread waits.
SPINS, FUTEX_WAIT, FUTEX_WAKE, SYSCALL, YIELD = range(144, 184, 8)

# A program. STATE: index of the current entry << ACTIVE_BITS | threads that work on it.
STATE, SLEEPERS = 0, 64
ENTRIES, NUM_ENTRIES = 128, 136
PROGRAM_BYTES = 192
ACTIVE_BITS = 16

# An entry. COUNTERS: words at the head of its arguments that begin at 0. ENDED: the time stamp
# counter when its last thread left.
KERNEL, ARGS, SERIAL, COUNTERS, ENDED = range(0, 40, 8)
ENTRY_BYTES = 64

# The helpers. TURN changes when there is a program to help with.
TURN, WAITING = 0, 64
PROGRAM = 128
HELPERS_BYTES = 192
