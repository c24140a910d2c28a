"""What is certain about a column: the factor of H, the gap, the audit."""
