"""Several processes that prune one model together, through torch.distributed: who they are, how they meet, who does what."""
