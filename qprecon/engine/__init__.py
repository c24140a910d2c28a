"""From a problem to an answer: choices, rounds, what is kept."""
