"""The parts of the backend pcg."""
