"""What is asked: H, the problem of the columns, its two forms."""
