"""What is summed over the calibration tokens: Gram matrices, drift, gradients; and the weights that they ask for."""
