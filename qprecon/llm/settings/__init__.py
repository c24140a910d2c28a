"""What a run is asked to do: every option once, in Python, on the command line, in files and in other tools' words."""
