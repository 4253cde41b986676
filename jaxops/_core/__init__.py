"""What every operator shares: primitives, batching, sharding, native handlers, argument checks."""
