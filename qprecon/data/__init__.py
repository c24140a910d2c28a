"""H and XᵀY from batches of data; ridge regression on them."""
