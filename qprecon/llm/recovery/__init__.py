"""Recovery: a pruned model trained towards the dense one (distillation), its masks held."""
