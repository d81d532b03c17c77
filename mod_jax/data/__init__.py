"""Text in, batches out: sources of documents, tokenizers, and the pipeline between them."""
