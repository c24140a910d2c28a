"""What core and solvers hand each other, which solvers there are, and what options they take."""

from .interface import Backend, Capabilities, Chunk, RawColumns, System

__all__ = ["Backend", "Capabilities", "Chunk", "RawColumns", "System"]
