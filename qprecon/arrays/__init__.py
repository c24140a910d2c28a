"""Arrays of any library: in and out, and the dense kernels that the rest is built on."""
