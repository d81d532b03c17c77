"""Text in, batches out: sources of documents, tokenizers, the prepared corpus, and batches."""
