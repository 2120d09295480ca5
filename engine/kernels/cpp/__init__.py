"""The native backend: C++ for the instruction sets of a CPU, called through ctypes.

`src/taut.h` is the interface, `library` finds and opens the library; the other modules register
the ops that they serve. Without the library every one of them refuses, and torch serves.
"""
