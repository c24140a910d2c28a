"""The options of settings that have some, and what they refuse. No torch here, so that a wrong one is told at once."""
