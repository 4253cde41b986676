"""Code of every operator: primitives, batching, sharding, native handlers, argument checks."""
