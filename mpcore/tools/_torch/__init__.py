"""What the tools alone use of torch under a private name. `mpcore._torch` says how to support a new torch."""
