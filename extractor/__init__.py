"""From text to store: corpora through frozen language models, the residuals of every layer kept in Zarr."""
