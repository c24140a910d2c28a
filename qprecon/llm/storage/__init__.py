"""Files: checkpoints read tensor by tensor, the journal of an unfinished run, the output folder."""
