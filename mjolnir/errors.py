"""Errors of the attention backend.

MjolnirError
├── ConfigurationError    a setting that can't be used: names it, its value and what is accepted
├── CounterFileError      a counters file that is truncated, foreign or of another version
├── KernelInspectionError machine code that can't be disassembled here
├── KernelMissingError    a kernel variant that would have to be compiled when it is too late for that
├── LayoutError           a KV cache whose shape or strides T5 can't read
├── PlanError             a plan that does not fit its buffers
└── ScalesError           a scale file that can't be read, used or written
"""


class MjolnirError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigurationError(MjolnirError, ValueError):
    """A setting that can't be used; the message names it, its value and what is accepted."""


class CounterFileError(MjolnirError):
    """A counters file that is truncated, foreign or of another version."""


class KernelInspectionError(MjolnirError):
    """Machine code that can't be disassembled here: a tool is missing, or does not know the architecture."""


class KernelMissingError(MjolnirError, RuntimeError):
    """A kernel variant that is not compiled, at a point where it is too late to compile; names the variant."""


class LayoutError(MjolnirError, ValueError):
    """A KV cache whose shape or strides T5 can't read."""


class PlanError(MjolnirError, ValueError):
    """A plan that does not fit its buffers."""


class ScalesError(MjolnirError, ValueError):
    """A scale file that can't be read, used or written; the message names it and what is accepted."""
