"""What leaves Ratel: exports, adapters, merged weights, model cards, and how they are published."""
