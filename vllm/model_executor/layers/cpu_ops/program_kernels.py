# SPDX-License-Identifier: Apache-2.0
"""Runs a program: a list of (kernel, arguments), one after the other, on several threads. Numba
code.

    STATE = entry << 16 | threads at work on it

A thread joins the current entry (active + 1), calls its kernel, which takes work until there is
none, and leaves. The last one to leave opens the next entry in the same atomic exchange. So an
entry waits for those who began some of its work, and never for a thread that the system has not
let run: whoever comes late joins wherever the others are. Whoever waits spins a bounded while,
then sleeps on a futex (where the system has none, it yields).

A thread clears the counters of entry k + 1 while it is counted in entry k, so that nobody can be
in k + 1 yet, and nobody has been left there from the run before.
"""

from __future__ import annotations

from collections.abc import Callable

from . import program_args as A
from .rows import jit
from .simd import Simd

_LOW_WORD = 0xFFFFFFFF
_ACTIVE = (1 << A.ACTIVE_BITS) - 1
_ALL_SLEEPERS = 0x7FFFFFFF


def make_wait(simd: Simd) -> tuple[Callable, Callable]:
    """wait(p, address, sleepers, seen): until the low half of the word at `address` isn't `seen`,
    or for no reason; wake(p, address, sleepers): those that sleep on it."""
    iload64, atomic_load, atomic_add = simd.iload64, simd.atomic_load, simd.atomic_add
    pause, call0, call_futex = simd.pause, simd.call0, simd.call_futex

    @jit
    def wait(p, address, sleepers, seen):
        for _ in range(iload64(p + A.SPINS)):
            if atomic_load(address) != seen:
                return
            pause()
        syscall = iload64(p + A.SYSCALL)
        if syscall == 0:
            call0(iload64(p + A.YIELD))
            return
        atomic_add(sleepers, 1)
        # The system compares once more: a wake between the last look and this call isn't missed.
        call_futex(
            syscall, address, iload64(p + A.FUTEX_WAIT), seen & _LOW_WORD
        )
        atomic_add(sleepers, -1)

    @jit
    def wake(p, address, sleepers):
        if atomic_load(sleepers) != 0:
            call_futex(
                iload64(p + A.SYSCALL), address, iload64(p + A.FUTEX_WAKE), _ALL_SLEEPERS
            )

    return wait, wake


def make_run(simd: Simd) -> Callable:
    """run(p): works on the program until its end."""
    iload64, istore64, atomic_load, exchange = (
        simd.iload64,
        simd.istore64,
        simd.atomic_load,
        simd.compare_exchange,
    )
    call1, cycles = simd.call1, simd.cycles
    wait, wake = make_wait(simd)

    @jit
    def clear(entry):
        args = iload64(entry + A.ARGS)
        for i in range(iload64(entry + A.COUNTERS)):
            istore64(args + 8 * i, 0)

    @jit
    def leave(p, index):
        """Counts this thread out of entry `index`; the last one opens the next."""
        following = index + 1
        entry = iload64(p + A.ENTRIES) + index * A.ENTRY_BYTES
        while True:
            state = atomic_load(p + A.STATE)
            if state & _ACTIVE > 1:
                if exchange(p + A.STATE, state, state - 1):
                    return
            else:
                if following < iload64(p + A.NUM_ENTRIES):
                    clear(entry + A.ENTRY_BYTES)
                istore64(entry + A.ENDED, cycles())
                if exchange(p + A.STATE, state, following << A.ACTIVE_BITS):
                    wake(p, p + A.STATE, p + A.SLEEPERS)
                    return

    @jit
    def run(p):
        joined = -1
        while True:
            state = atomic_load(p + A.STATE)
            index = state >> A.ACTIVE_BITS
            if index >= iload64(p + A.NUM_ENTRIES):
                return
            entry = iload64(p + A.ENTRIES) + index * A.ENTRY_BYTES
            taken = state & _ACTIVE > 0 and iload64(entry + A.SERIAL) != 0
            if index == joined or taken:
                wait(p, p + A.STATE, p + A.SLEEPERS, state)
            elif exchange(p + A.STATE, state, state + 1):
                call1(iload64(entry + A.KERNEL), iload64(entry + A.ARGS))
                leave(p, index)
                joined = index

    return run


def build(simd: Simd) -> dict[str, Callable]:
    iload64, istore64, atomic_load, atomic_add = (
        simd.iload64,
        simd.istore64,
        simd.atomic_load,
        simd.atomic_add,
    )
    cycles = simd.cycles
    run, (wait, wake) = make_run(simd), make_wait(simd)

    def run_program(p):
        """One run, from the first entry on; whoever comes in meanwhile helps. `p`: the program's
        address, then the helpers' (0: none)."""
        program, helpers = iload64(p), iload64(p + 8)
        first = iload64(program + A.ENTRIES)
        args = iload64(first + A.ARGS)
        for i in range(iload64(first + A.COUNTERS)):
            istore64(args + 8 * i, 0)
        istore64(p + 16, cycles())
        if helpers != 0:
            istore64(helpers + A.PROGRAM, program)
        atomic_add(program + A.STATE, -atomic_load(program + A.STATE))
        if helpers != 0:
            atomic_add(helpers + A.TURN, 1)
            wake(helpers, helpers + A.TURN, helpers + A.WAITING)
        run(program)

    def help_programs(helpers):
        """A helper's life: runs along with each program, to the end of the process."""
        seen = 0
        while True:
            turn = atomic_load(helpers + A.TURN)
            program = iload64(helpers + A.PROGRAM)
            if turn == seen:
                wait(helpers, helpers + A.TURN, helpers + A.WAITING, turn)
            else:
                seen = turn
                run(program)

    return {"run_program": run_program, "help_programs": help_programs}
