"""The run itself: its settings and checks, the loop, and what is done to a layer."""
