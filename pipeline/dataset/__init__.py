"""Offline data sets: many samples per prompt, filtered, published as Parquet shards with a card."""
